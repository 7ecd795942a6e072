"""From the plan of a step to tensors and through the network. Two forms: fast, and repeatable."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from gpu_worker.backends.decoder.arena import ModelPages
from gpu_worker.backends.decoder.attention import DecodingRows, GroupedAttention, LoneAttention, LoneRow, PromptRows
from gpu_worker.backends.decoder.compiled import kernel_for
from gpu_worker.backends.decoder.network import DecoderNetwork, Rows
from gpu_worker.decoding.sequence import Chunk

LOGIT_ROWS = 64
"""Rows whose logits are held at once when a prompt is scored: 49,152 tokens x 4 bytes each."""


class Runner(Protocol):
    def run(self, chunks: Sequence[Chunk], all_rows: Sequence[bool]) -> list[Tensor]:
        """For each chunk the logits (rows, vocabulary) of its last row, or of all its rows where asked for.

        A chunk that neither chooses a token nor is asked for all gets none (0 rows).
        """
        ...


class FastRunner:
    """One forward pass for all rows of the step."""

    arithmetic = "fast"

    def __init__(self, network: DecoderNetwork, pages: ModelPages) -> None:
        self._network = network
        self._pages = pages
        self._kernel = kernel_for(network.device, network.dtype)

    def run(self, chunks: Sequence[Chunk], all_rows: Sequence[bool]) -> list[Tensor]:
        decoding, prompts = self._sorted(chunks)
        order = [place for group in decoding for place in group] + prompts
        ids: list[int] = []
        positions: list[int] = []
        homes: list[int] = []
        acting: list[bool] = []
        starts: dict[int, int] = {}
        block = self._pages.block_tokens
        for place in order:
            chunk = chunks[place]
            starts[place] = len(ids)
            ids += chunk.sequence.ids[chunk.start : chunk.end]
            positions += range(chunk.start, chunk.end)
            blocks = chunk.sequence.blocks
            homes += [blocks[position // block] for position in range(chunk.start, chunk.end)]
            acting += [chunk.sequence.acted_on(position) for position in range(chunk.start, chunk.end)]
        self._pages.clear([page for chunk in chunks if (page := _begun(chunk, block)) is not None])
        device = self._network.device
        where = torch.tensor(positions, device=device)
        attention = GroupedAttention(
            [self._decoding(chunks, group, starts[group[0]]) for group in decoding],
            [self._prompt(chunks[place], starts[place]) for place in prompts],
        )
        rows = Rows(
            *(torch.tensor(ids, device=device), where, torch.tensor(homes, device=device), where % block, attention),
            acting=_acting(self._network, acting),
        )
        states = self._network.hidden(rows, self._pages)
        return self._logits(states, chunks, all_rows, starts)

    def _sorted(self, chunks: Sequence[Chunk]) -> tuple[list[list[int]], list[int]]:
        """Places of decoding chunks, and places of the others.

        The first are grouped so that padding at most doubles what is read; the compiled kernel reads no padding.
        """
        groups: dict[int, list[int]] = {}
        prompts: list[int] = []
        for place, chunk in enumerate(chunks):
            if chunk.count == 1 and chunk.start:
                pages = -(-chunk.end // self._pages.block_tokens)
                groups.setdefault(pages.bit_length() if self._kernel is None else 0, []).append(place)
            else:
                prompts.append(place)
        return [groups[size] for size in sorted(groups)], prompts

    def _decoding(self, chunks: Sequence[Chunk], group: Sequence[int], first: int) -> DecodingRows:
        block, device = self._pages.block_tokens, self._network.device
        lengths = [chunks[place].end for place in group]
        longest = -(-max(lengths) // block)
        table = [_padded(chunks[place].sequence.blocks, longest) for place in group]
        rows = slice(first, first + len(group))
        return DecodingRows(
            rows, torch.tensor(table, device=device), torch.tensor(lengths, device=device), self._kernel
        )

    def _prompt(self, chunk: Chunk, first: int) -> PromptRows:
        pages = -(-chunk.end // self._pages.block_tokens)
        table = torch.tensor(chunk.sequence.blocks[:pages], device=self._network.device)
        return PromptRows(slice(first, first + chunk.count), table, chunk.start)

    def _logits(
        self, states: Tensor, chunks: Sequence[Chunk], all_rows: Sequence[bool], starts: dict[int, int]
    ) -> list[Tensor]:
        lasts = [
            starts[place] + chunk.count - 1
            for place, chunk in enumerate(chunks)
            if chunk.chooses and not all_rows[place]
        ]
        chosen = iter(self._network.logits(states[lasts]) if lasts else ())
        none = states.new_empty((0, self._network.shape.vocabulary), dtype=torch.float32)
        answers: list[Tensor] = []
        for place, chunk in enumerate(chunks):
            if all_rows[place]:
                mine = states[starts[place] : starts[place] + chunk.count]
                answers.append(torch.cat([self._network.logits(part) for part in mine.split(LOGIT_ROWS)]))
            else:
                answers.append(next(chosen)[None] if chunk.chooses else none)
        return answers


class _Place(NamedTuple):
    """Where a token of a chunk sits in a tile."""

    row: int
    chunk: int
    position: int


TILE_ROWS = 16


class RepeatableRunner:
    """The same bits for a request whatever runs beside it, however its prompt is cut, and whatever was cached.

    Products of different sizes add in different orders, so all are made the same size: tiles of TILE_ROWS rows. The
    token at position p always sits in row p mod TILE_ROWS of some tile, alone or not, and attends alone. What a row
    computes then depends on nothing but the row.
    """

    arithmetic = "repeatable"

    def __init__(self, network: DecoderNetwork, pages: ModelPages) -> None:
        self._network = network
        self._pages = pages

    def run(self, chunks: Sequence[Chunk], all_rows: Sequence[bool]) -> list[Tensor]:
        parts: list[list[Tensor]] = [[] for _ in chunks]
        for tile in tiles_of(chunks):
            states = self._hidden(chunks, tile)
            wanted = [
                place
                for place in tile
                if all_rows[place.chunk]
                or (chunks[place.chunk].chooses and place.position == chunks[place.chunk].end - 1)
            ]
            if wanted:
                logits = self._network.logits(states)
                for place in wanted:
                    parts[place.chunk].append(logits[place.row])
        none = torch.empty((0, self._network.shape.vocabulary))
        return [torch.stack(rows) if rows else none for rows in parts]

    def _hidden(self, chunks: Sequence[Chunk], tile: Sequence[_Place]) -> Tensor:
        block, device = self._pages.block_tokens, self._network.device
        ids, positions = [0] * TILE_ROWS, [0] * TILE_ROWS
        homes: list[int] = []
        lone: list[LoneRow] = []
        acting = [False] * TILE_ROWS
        for row, chunk, position in tile:
            sequence = chunks[chunk].sequence
            ids[row], positions[row] = sequence.ids[position], position
            acting[row] = sequence.acted_on(position)
            homes.append(sequence.blocks[position // block])
            table = torch.tensor(sequence.blocks[: position // block + 1], device=device)
            lone.append(LoneRow(row, position, table))
        rows = Rows(
            ids=torch.tensor(ids, device=device),
            positions=torch.tensor(positions, device=device),
            pages=torch.tensor(homes, device=device),
            slots=torch.tensor([place.position % block for place in tile], device=device),
            attention=LoneAttention(lone),
            stored=torch.tensor([place.row for place in tile], device=device),
            acting=_acting(self._network, acting),
        )
        return self._network.hidden(rows, self._pages)


def _acting(network: DecoderNetwork, rows: Sequence[bool]) -> Tensor | None:
    """See Rows. Only an activated adapter leaves any row out."""
    if network.adapter is None or not network.adapter.invocation:
        return None
    return torch.tensor(rows, device=network.device)[:, None]


def tiles_of(chunks: Sequence[Chunk]) -> list[list[_Place]]:
    """Tokens packed into tiles; those of one sequence in order, so that each finds the keys of those before it."""
    tiles: list[dict[int, _Place]] = []
    for number, chunk in enumerate(chunks):
        tile = 0
        for position in range(chunk.start, chunk.end):
            row = position % TILE_ROWS
            while tile < len(tiles) and row in tiles[tile]:
                tile += 1
            if tile == len(tiles):
                tiles.append({})
            tiles[tile][row] = _Place(row, number, position)
    return [list(tile.values()) for tile in tiles]


def _begun(chunk: Chunk, block: int) -> int | None:
    """The page that the chunk begins and does not fill."""
    first = chunk.end // block * block
    return chunk.sequence.blocks[first // block] if chunk.start <= first < chunk.end else None


def _padded(blocks: Sequence[int], count: int) -> list[int]:
    return [*blocks[:count], *[blocks[0]] * (count - len(blocks))]
