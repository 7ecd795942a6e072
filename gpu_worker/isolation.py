"""How engines of different tiers share the processors of one machine."""

from __future__ import annotations

ENGINE_NICE: dict[str, int] = {"": 0, "tier-0": 0, "tier-1": 10, "tier-2": 19}
"""Tier of the worker -> niceness of its engine processes.

A scorer of tier-0 needs a millisecond; an engine that generates text takes all it gets. The kernel wakes the scorer
(and hosts and broker, which stay at 0) at once when the other has a lower priority, which gets what is left.
"""
