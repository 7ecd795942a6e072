"""A decision depends on a setting only if leaders tell that setting on the log: others would fold it otherwise."""

from __future__ import annotations

import re

from scheduler.machine import fold_settings, in_force
from sie_stream.control import FoldSettings
from sie_stream.settings import Settings, settings_from
from tests.architecture.source import project_files

READ = re.compile(r"\bstep\.settings\.(\w+)")
OF_OTHERS = {"topics": "topic_prefix", "trial_backends": "trial_engines"}
"""Properties, and the setting that they are made of."""


def test_settings_that_the_fold_reads_are_told_on_the_log() -> None:
    read = {
        OF_OTHERS.get(name, name)
        for source in project_files()
        if source.name.startswith("scheduler/")
        for name in READ.findall(source.text)
    }
    assert len(read) > 5, "the pattern does not fit the code any more"
    assert read <= set(FoldSettings.__struct_fields__), "not in FoldSettings"


def test_what_a_leader_tells_overrules_the_settings_of_who_folds() -> None:
    told = fold_settings(settings_from({"trial_engines": "onnx", "topic_prefix": "other."}))
    mine = in_force(Settings(), told)
    assert (mine.trial_backends, mine.topic_prefix) == ({"onnx"}, "other.")
