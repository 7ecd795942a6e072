"""Where an activated LoRA adapter begins to act on a prompt. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from gpu_worker.decoding.blocks import Activation


class Invocation(Struct, frozen=True):
    """tokens: the sequence that invokes the adapter, not empty. adapter: names it in digests of blocks."""

    tokens: tuple[int, ...]
    adapter: bytes

    def activation(self, prompt: Sequence[int]) -> Activation | None:
        """It acts on the last invocation in the prompt and on all that follows, the answer included. None when the
        prompt has none: the answer is then that of the base. PEFT has the same rule (arXiv:2504.12397).
        """
        wanted = list(self.tokens)
        for start in range(len(prompt) - len(wanted), -1, -1):
            if list(prompt[start : start + len(wanted)]) == wanted:
                return Activation(start, self.adapter)
        return None
