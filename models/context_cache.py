"""Context keys and values of a block-diffusion drafter in decoding."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class ContextCache:
    """Context keys and values of verified positions, for each draft layer and request.

    Attributes:
        lengths: verified positions of each request; what stands beyond them in a buffer is never read.
    """

    def __init__(self, batch_size: int, num_layers: int) -> None:
        self.lengths = [0] * batch_size
        self._buffers: list[list[Tensor]] = [[] for _ in range(num_layers)]

    def append(self, layer: int, new: Sequence[Tensor], counts: Sequence[int]) -> None:
        """Writes one layer's new entries after each request's own length, which `advance` then moves.

        Args:
            new: keys and values, each (batch, seq, kv_head, head_dim), left-aligned.
            counts: how many of the seq positions are real in each request.
        """
        needed = max(length + count for length, count in zip(self.lengths, counts, strict=True))
        buffers = self._buffers[layer] or [x.new_zeros(x.shape[0], 0, *x.shape[2:]) for x in new]
        self._buffers[layer] = [_with_room(buffer, needed) for buffer in buffers]
        for buffer, rows in zip(self._buffers[layer], new, strict=True):
            for request, (begin, count) in enumerate(zip(self.lengths, counts, strict=True)):
                buffer[request, begin : begin + count] = rows[request, :count]

    def advance(self, counts: Sequence[int]) -> None:
        """Takes what was appended to every layer as verified."""
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]

    def contexts(self) -> list[tuple[Tensor, Tensor]]:
        """For each draft layer keys and values, each (batch, capacity, kv_head, head_dim).

        Raises:
            ValueError: nothing was observed yet.
        """
        if not all(self._buffers):
            raise ValueError("the drafter has seen no position yet: call observe with the prompt's states first")
        return [(keys, values) for keys, values in self._buffers]


def _with_room(buffer: Tensor, needed: int) -> Tensor:
    """A buffer (batch, capacity, ...) with room for `needed` positions; doubled, so that copies stay rare."""
    capacity = buffer.shape[1]
    if needed <= capacity:
        return buffer
    # Zeros, not fresh memory: a NaN there would pass through a product with a weight of 0.
    grown = torch.zeros(
        (buffer.shape[0], max(needed, 2 * capacity), *buffer.shape[2:]), dtype=buffer.dtype, device=buffer.device
    )
    grown[:, :capacity] = buffer
    return grown
