"""The target's keys and values in decoding, for a batch of requests that are rolled back each by its own length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache


class KVCache:
    """Keys and values of a batch of requests.

    `Target.extend` appends one slot for each new token, and `keep` then says how many of them stay in each request. A
    slot that no request keeps is dropped; one that only some keep is hidden from the others.

    Attributes:
        layers: transformers' cache, every layer (batch, kv_head, slot, head_dim).
        visible: (batch, slot) bool, what stays in each request.
        lengths: the number of visible slots of each request, which is the position of its next token.
    """

    def __init__(self, model_config: Any, batch_size: int, device: torch.device) -> None:
        """An empty cache.

        Raises:
            ValueError: the target has layers that cannot be rolled back, or not for several requests at once.
        """
        self.layers = DynamicCache(config=model_config)
        self.layers.activate_past_recording()
        kinds = [(f"{i} ({type(layer).__name__})", layer) for i, layer in enumerate(self.layers.layers)]
        stuck = [kind for kind, layer in kinds if not layer.is_croppable]
        if stuck:
            raise ValueError(
                f"the cache of the target's layers {', '.join(stuck)} cannot be rolled back, which speculative "
                "decoding needs after a rejected draft; such a target can be trained for, not decoded here"
            )
        sliding = [kind for kind, layer in kinds if layer.is_sliding]
        if sliding and batch_size > 1:
            raise ValueError(
                f"batch_size={batch_size}: the cache of the target's layers {', '.join(sliding)} slides by one and the "
                "same length for all requests; decode with batch_size=1"
            )
        self.visible = torch.ones(batch_size, 0, dtype=torch.bool, device=device)
        self.lengths = [0] * batch_size

    def position_ids(self, count: int) -> Tensor:
        """Positions of the next `count` tokens of each request: (batch, count)."""
        device = self.visible.device
        return torch.tensor(self.lengths, device=device)[:, None] + torch.arange(count, device=device)

    def attention_mask(self, count: int) -> Tensor | None:
        """What the next `count` tokens may see by its slot, (batch, slot + count); None: everything."""
        if min(self.lengths) == self.visible.shape[1]:
            return None
        return torch.nn.functional.pad(self.visible, (0, count), value=True)

    def keep(self, counts: Sequence[int]) -> None:
        """Says how many of the tokens of the last `Target.extend` stay in each request. Call it after every one."""
        added = self.layers.get_seq_length() - self.visible.shape[1]
        most = max(counts)
        self.layers.crop(most - added)  # by 0 too: a sliding layer drops what has left its window only here
        slots = torch.arange(most, device=self.visible.device)
        kept = slots < torch.tensor(counts, device=slots.device)[:, None]
        self.visible = torch.cat((self.visible, kept), dim=1)
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]
        if self.visible.shape[1] > 2 * max(self.lengths):
            self._close_gaps()

    def _close_gaps(self) -> None:
        """Moves every request's visible slots to the front, in order."""
        order = self.visible.sort(dim=1, descending=True, stable=True).indices[:, : max(self.lengths)]
        for layer in self.layers.layers:
            where = order[:, None, :, None]
            layer.keys = layer.keys.take_along_dim(where, dim=2)
            layer.values = layer.values.take_along_dim(where, dim=2)
        self.visible = self.visible.take_along_dim(order, dim=1)
