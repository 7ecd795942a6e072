"""A new version whose replicas are all gone gives its keys to the stable version for the time.

Its worker died, say: whoever asks must not wait for another place while replicas that serve stand by. The share and its
buckets stay in the plan: the same keys come back as soon as the new version has the replicas that its share needs, and
the step is held anew. What waits in its own topic is answered by it. That its worker died says nothing about the
version, so nothing is rolled back for it; whether its replicas are given up is judged as ever.

An engine that ended alone is back in seconds, so its keys wait for it. Only one that is away for longer is gone round,
and then its keys come back when it has stood for a while (`ENGINE_AWAY_MS`): a request that kills it is among the first
that it runs again, from its own topic, and keys must not go to and fro with each of its deaths.
"""

from __future__ import annotations

from msgspec import structs

from scheduler.rollout import RolloutState, Said
from scheduler.rollout_seen import Seen


def bypass(state: RolloutState, seen: Seen, now_ms: int) -> tuple[RolloutState, Said] | None:
    """Whether its keys go round it from now on, or come back. None: neither."""
    if state.phase not in ("serving", "adopting") or not state.share or seen.given_up or seen.deleted or seen.adopted:
        return None
    if state.bypassed:
        enough = max(1, seen.wanted) if seen.stable_ready else 1
        return _back(state, seen, now_ms) if seen.ready >= enough else None
    if seen.ready or not seen.stable_ready:
        return None
    return _round(state, seen)


def _round(state: RolloutState, seen: Seen) -> tuple[RolloutState, Said]:
    share = f"{state.share / 100:g} %"
    holding = f"no replica of {state.version} is ready: its {share} of the keys go to {state.version_before} meanwhile"
    why = f" ({seen.lacking})" if seen.lacking else ""
    moved = structs.replace(state, bypassed=True, holding=holding, holding_told=True)
    return moved, Said(
        "rollout_bypassed",
        f"No replica of {state.version} is ready any more{why}. Until it is back its {share} of the keys go to "
        f"{state.version_before} ({seen.stable_ready} ready), and the rollout holds.",
        f"{share} of the keys would wait for {state.version}.",
    )


def _back(state: RolloutState, seen: Seen, now_ms: int) -> tuple[RolloutState, Said]:
    moved = structs.replace(state, bypassed=False, holding="", holding_told=False, since_ms=now_ms)
    return moved, Said(
        "rollout_back",
        f"{state.version} is ready again ({seen.ready}): its {state.share / 100:g} % of the keys come back, and the "
        "step is held anew.",
        f"They would stay with {state.version_before}.",
    )
