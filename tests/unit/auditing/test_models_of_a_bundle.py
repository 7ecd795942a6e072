"""A bundle explains every answer in it: declarations and cards also of versions that were replaced since."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec import Raw

from schemas.codec import encode_cluster, encode_row
from sie_stream.cli.audit_models import GONE, MODEL_CARD, write_models
from sie_stream.commands import ApplyModel, StartRollout
from sie_stream.control import ModelRow
from sie_stream.ids import TopicNames
from sie_stream.ports import TopicSpec
from sie_stream.records import LogWrite
from sie_stream.sim.log import SimLog
from tests.unit.scheduler.kit import spec_json
from tests.unit.scheduler.test_adapter_bases import ONE, TWO, chat, support

NAMES = TopicNames()


def package(folder: Path, version: str) -> bytes:
    """A declaration whose package, with a card, is in a folder of its own."""
    made = folder / version
    made.mkdir()
    (made / MODEL_CARD).write_text(f"the card of {version}")
    return spec_json(version=version, source={"uri": str(made)})


@pytest.fixture
def log(tmp_path: Path) -> SimLog:
    """1.0.0 and 1.1.0 (a variant, by `rollout start`) answered; 2.0.0 is what is declared now."""
    log = SimLog()
    log.admin().ensure([TopicSpec(NAMES.cluster, 1, {}), TopicSpec(NAMES.models, 1, {})])
    specs = {version: package(tmp_path, version) for version in ("1.0.0", "1.1.0", "2.0.0")}
    commands = (
        ApplyModel(Raw(b'{"name": "churn", "version": "1.0.0"}')),  # refused: half of it is missing
        ApplyModel(Raw(specs["1.0.0"])),
        StartRollout(Raw(specs["1.1.0"]), "b", 2_000),
        ApplyModel(Raw(specs["2.0.0"])),
    )
    row = ModelRow("churn", "2.0.0", 2, Raw(specs["2.0.0"]), "accepted", 7)
    writer = log.plain_writer()
    writer.write([LogWrite(NAMES.cluster, encode_cluster(one), b"churn", 0) for one in commands])
    writer.write([LogWrite(NAMES.models, encode_row(row), b"churn")])
    return log


def test_every_version_that_answered_is_in_it_with_its_card(log: SimLog, tmp_path: Path) -> None:
    folder = tmp_path / "models"
    answered = {("churn", "1.0.0"): 5, ("churn", "1.1.0"): 2, ("churn", "2.0.0"): 1, ("", ""): 3, ("nobody", ""): 1}
    names, gone = write_models(folder, log.reader("test"), NAMES, answered)
    assert names == ("churn@2.0.0", "churn@1.0.0", "churn@1.1.0")
    assert gone == {}
    assert json.loads((folder / "churn@1.1.0.json").read_text())["spec"]["version"] == "1.1.0"
    cards = {path.name: path.read_text() for path in folder.glob(f"*.{MODEL_CARD}")}
    assert cards == {
        f"churn.{MODEL_CARD}": "the card of 2.0.0",
        f"churn@1.0.0.{MODEL_CARD}": "the card of 1.0.0",
        f"churn@1.1.0.{MODEL_CARD}": "the card of 1.1.0",
    }


def test_what_did_not_answer_is_not_in_it_and_what_is_gone_is_told(log: SimLog, tmp_path: Path) -> None:
    names, gone = write_models(tmp_path / "models", log.reader("test"), NAMES, {("churn", "0.9.0"): 4})
    assert names == ("churn@2.0.0",)
    assert gone == {GONE.format("churn", "0.9.0"): 4}


def test_the_card_lies_beside_a_file_of_weights(tmp_path: Path) -> None:
    (tmp_path / MODEL_CARD).write_text("beside")
    log = SimLog()
    log.admin().ensure([TopicSpec(NAMES.models, 1, {})])
    spec = Raw(spec_json(source={"uri": f"file://{tmp_path}/churn.skops"}))
    log.plain_writer().write(
        [LogWrite(NAMES.models, encode_row(ModelRow("churn", "1", 1, spec, "accepted", 7)), b"churn")]
    )
    write_models(tmp_path / "models", log.reader("test"), NAMES, {})
    assert (tmp_path / "models" / f"churn.{MODEL_CARD}").read_text() == "beside"


@pytest.mark.parametrize(
    ("versions", "answered", "base"),
    [
        ({"1.0.0": ONE}, set[str](), "chat@1.0.0"),
        ({"1.0.0": ONE, "2.0.0": TWO}, {ONE}, "chat@1.0.0"),
        ({"1.0.0": ONE, "2.0.0": TWO}, {TWO, ONE}, "chat@2.0.0"),
        ({"1.0.0": ONE, "2.0.0": TWO}, set[str](), None),
        ({"1.0.0": None, "2.0.0": None}, {ONE}, None),
    ],
)
def test_the_declaration_of_an_adapter_says_over_which_model_it_answered_or_stays_as_written(
    versions: dict[str, str | None], answered: set[str], base: str | None, tmp_path: Path
) -> None:
    """A version that a rollout brought may never have been the base, and a bundle tells nothing that may be wrong."""
    log = SimLog()
    log.admin().ensure([TopicSpec(NAMES.cluster, 1, {}), TopicSpec(NAMES.models, 1, {})])
    commands = [ApplyModel(Raw(spec)) for spec in (*(chat(*one) for one in versions.items()), support())]
    log.plain_writer().write([LogWrite(NAMES.cluster, encode_cluster(one), b"chat", 0) for one in commands])
    version = ("support", "1.0.0")
    write_models(tmp_path / "models", log.reader("test"), NAMES, {version: 1}, {version: answered})
    row = json.loads((tmp_path / "models" / "support@1.0.0.json").read_text())
    config = row["spec"]["backend"]["config"]
    assert config.get("base_model") == base
    assert config.get("base_digest") == (versions[base.partition("@")[2]] if base else None)
    assert (config["base"] == "model:chat") is (base is None)
