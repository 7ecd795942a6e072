"""Adapters over declared models: what `backend.config.base: model:NAME[@VERSION]` means when it is applied. Pure.

It is resolved once, where the declaration is accepted, to the place and the digest of that model's weights as they are
declared at that record. The accepted declaration carries them, with `base_model: NAME@VERSION`, so that whatever reads
it later sees which base it was. An adapter stays on that base while the base gets a new version or is deleted, for what
is read is files; one that names no version gets the new one when it is applied again.
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec
from msgspec import Raw, Struct

from scheduler.state import ClusterState, ModelState
from sie_stream.commands import ApplyModel, StartRollout
from sie_stream.control import ModelLaunch
from sie_stream.ids import base_of
from sie_stream.problems import Problem, SpecError, closest, shown
from sie_stream.spec import ModelSpec, from_json, to_json
from sie_stream.spec.bases import MODEL_BASE, named_base
from sie_stream.spec.model import BackendSpec, Tokenizer

FIELD = "backend.config.base"
BASE_MODEL = "base_model"
DECODER = ("torch", "text_generation")
NAMES_MAX = 8

Versions = Mapping[str, Sequence[Raw]]
"""Specs by model: the one that serves, then those of its rollouts."""
Known = Callable[[], Versions]
"""Asked only where an adapter names a model."""


def declared(state: ClusterState) -> Known:
    """What the fold knows at this record. A model that is being deleted is no base for anything new."""

    def known() -> Versions:
        return {name: _specs(model) for name, model in state.models.items() if _stands(name, model)}

    return known


def _stands(name: str, model: ModelState) -> bool:
    return model.status != "deleting" and base_of(name) == name


def _specs(model: ModelState) -> tuple[Raw, ...]:
    return (model.spec, *(rollout.spec for rollout in model.rollouts.values()))


class _Base(NamedTuple):
    model: str
    """NAME@VERSION."""
    place: str
    digest: str | None
    tokenizer: Tokenizer | None
    """By an absolute path."""


def resolved(spec: ModelSpec, known: Known) -> ModelSpec:
    """The declaration with the place of its base instead of its name. Raises SpecError that says what was meant."""
    named = named_base(spec)
    if named is None:
        return spec
    there = known()
    base = _as_before(spec, *named, there) or _as_declared(_found(*named, there))
    config = spec.backend.config | {"base": base.place, BASE_MODEL: base.model}
    given = config.get("base_digest")
    if base.digest and given and given != base.digest:
        message = f"{base.model} is declared with the digest {base.digest}. Leave it out, or correct it."
        raise SpecError([Problem(f"{FIELD}_digest", shown(given), message)])
    if base.digest:
        config["base_digest"] = base.digest
    changes: dict[str, object] = {"backend": spec.backend.model_copy(update={"config": config})}
    if spec.tokenizer is None:
        changes["tokenizer"] = base.tokenizer
    return spec.model_copy(update=changes)


def _as_declared(base: ModelSpec) -> _Base:
    place, tokenizer = base.source.uri.removeprefix("file://"), base.tokenizer
    if tokenizer is not None:
        folder = posixpath.dirname(place) if place.endswith(".gguf") else place
        tokenizer = tokenizer.model_copy(update={"path": posixpath.join(folder, tokenizer.path)})
    return _Base(base.at_version, place, base.source.digest, tokenizer)


def _as_before(spec: ModelSpec, name: str, version: str, known: Versions) -> _Base | None:
    """An adapter that names a version keeps it after the model went on to another one, also if it is applied again."""
    if name not in known or spec.name not in known or any(from_json(one).version == version for one in known[name]):
        return None
    own = from_json(known[spec.name][0])
    config, wanted = own.backend.config, f"{name}@{version}"
    if config.get(BASE_MODEL) != wanted or not config.get("base"):
        return None
    return _Base(wanted, str(config["base"]), config.get("base_digest"), own.tokenizer)


def shown_base(launch: ModelLaunch) -> dict[str, str]:
    """For decisions: which model is the base, if it was named."""
    named = _base_model(launch)
    return {"base": named} if named else {}


def left_below(state: ClusterState, model: ModelState) -> str:
    """What adapters that name this model make of its new declaration, as a sentence; empty: none lies elsewhere."""
    stay = [one for one in _adapters_over(state, model.model) if not _lies_over(one.launch, model.launch)]
    if not stay:
        return ""
    names = _listed(f"{one.model} (over {_base_model(one.launch)})" for one in stay)
    return (
        " Adapters stay on the weights that they were applied with; those that name no version follow when they are "
        f"applied again: {names}."
    )


def kept_by(state: ClusterState, name: str) -> str:
    """Which adapters need the weights of a model that goes, as a sentence; empty: none."""
    adapters = _adapters_over(state, name)
    if not adapters:
        return ""
    names = _listed(f"{one.model} (in {one.launch.config['base']})" for one in adapters)
    return f" Adapters go on over its weights, so leave these where they are: {names}."


def _base_model(launch: ModelLaunch) -> str:
    """NAME@VERSION; empty: the base is none by name. Other backends have options of their own."""
    if launch.backend != DECODER[0] or not launch.config.get("base"):
        return ""
    return str(launch.config.get(BASE_MODEL) or "")


def _adapters_over(state: ClusterState, name: str) -> list[ModelState]:
    """Those of variants, too. In the order of the log."""
    over = [one for one in state.models.values() if one.status != "deleting"]
    return [one for one in over if _base_model(one.launch).partition("@")[0] == name]


def _lies_over(adapter: ModelLaunch, base: ModelLaunch) -> bool:
    """Whether the adapter would be given the same base again."""
    same = (_base_model(adapter), adapter.config["base"]) == (f"{base.model}@{base.version}", base.source)
    return same and base.weights_digest in ("", adapter.config.get("base_digest"))


def _listed(names: Iterable[str]) -> str:
    found = list(names)
    more = len(found) - NAMES_MAX
    return ", ".join(found[:NAMES_MAX]) + (f" and {more} more" if more > 0 else "")


def _found(name: str, version: str, known: Versions) -> ModelSpec:
    if name not in known:
        message = f"no model {name!r} is declared. Apply it first; `sie-stream get models` lists what there is."
        raise _no_base(name, version, message, known)
    specs = [from_json(spec) for spec in known[name]]
    found = next((spec for spec in specs if version in ("", spec.version)), None)
    if found is None:
        there = [spec.at_version for spec in specs]
        message = f"no version {version!r} of {name} serves or is rolled out."
        raise _problem(name, version, message, closest(f"{name}@{version}", there), there)
    if found.lora is not None or found.backend.config.get("base"):
        message = f"{name} is an adapter itself, and an adapter over another one is not followed."
        raise _problem(name, version, message, found.lora.base if found.lora is not None else None)
    if (found.backend.name, found.backend.config.get("kind")) != DECODER:
        message = f"{name} is no model of backend torch and kind text_generation: only those take adapters."
        raise _no_base(name, version, message, known)
    return found


class _Backend(Struct):
    name: str = BackendSpec().name
    config: dict[str, Any] = {}


class _Kind(Struct):
    """As much of a declaration as says whether it may be a base. What has its default is not written."""

    backend: _Backend = msgspec.field(default_factory=_Backend)
    lora: object = None


def _takes_adapters(spec: Raw) -> bool:
    read = msgspec.json.decode(spec, type=_Kind)
    return (read.backend.name, read.backend.config.get("kind")) == DECODER and read.lora is None


def _no_base(name: str, version: str, message: str, known: Versions) -> SpecError:
    """With the nearest of those that are bases; all of them where none is near."""
    bases = sorted(one for one, specs in known.items() if _takes_adapters(specs[0]))
    nearest = closest(name, bases)
    return _problem(name, version, message, nearest, bases[:NAMES_MAX] if nearest is None else ())


def _problem(
    name: str, version: str, message: str, nearest: str | None = None, allowed: Sequence[str] = ()
) -> SpecError:
    value = f"{MODEL_BASE}{name}{'@' if version else ''}{version}"
    options = tuple(f"{MODEL_BASE}{one}" for one in allowed)
    guess = None if nearest is None else f"{MODEL_BASE}{nearest}"
    return SpecError([Problem(FIELD, shown(value), f"{shown(value)}: {message}", options, guess)])


class Following:
    """What `model:NAME` may have meant, for those who read sie.cluster without the fold.

    Which of several declared versions of a base served at a record only the fold says. So each that was declared before
    is a reading, the likeliest last; the digest that a result names tells which it was.
    """

    def __init__(self) -> None:
        self._specs: dict[str, list[Raw]] = {}

    def readings(self, command: ApplyModel | StartRollout) -> list[Raw]:
        """The declaration with each base it may have; none where the scheduler refused it, as the base was deleted
        before or is none. As it stands where no model is named, or the log begins after the base was declared.

        Raises SpecError for what is no declaration.
        """
        spec = from_json(command.spec)
        named = named_base(spec)
        if named is None or named[0] not in self._specs:
            found = [command.spec]
        else:
            found = [Raw(to_json(one)) for one in self._over(spec, named[0])]
        if found:
            self._remember(spec, beside=isinstance(command, StartRollout))
        return found

    def withdrawn(self, model: str) -> None:
        self._specs[model] = []

    def _over(self, spec: ModelSpec, name: str) -> Iterator[ModelSpec]:
        for base in self._specs.get(name, ()):
            known: Versions = {name: (base,)}
            with suppress(SpecError):  # of another version, or no base
                yield resolved(spec, lambda known=known: known)

    def _remember(self, spec: ModelSpec, *, beside: bool) -> None:
        """What is rolled out beside is less likely than what was applied."""
        known = self._specs.setdefault(spec.name, [])
        raw = Raw(to_json(spec))
        if raw in known:
            known.remove(raw)
        known.insert(0 if beside else len(known), raw)
