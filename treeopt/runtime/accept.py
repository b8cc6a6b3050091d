"""Accept: which of the verified drafts are kept. Pure functions on tensors."""

from __future__ import annotations

from torch import Tensor


def greedy(tokens: Tensor, choice: Tensor, parents: Tensor, ancestors: Tensor) -> Tensor:
    """The deepest node whose every draft is what the base model itself chooses there.

    A draft is right when it equals the choice at its parent. Siblings hold different tokens, so all right nodes lie on
    one path; nodes are sorted by depth, so the last of them is the deepest. No path is padded, so nothing else than a
    draft can be accepted, whatever its token id.

    Args:
        tokens: int64 [N], each node's token.
        choice: int64 [N], the base model's choice after each node.
        parents: int64 [N], each node's parent; the root is its own.
        ancestors: bool [N, N], True where the column's node is on the row's path.

    Returns:
        int64 []: the accepted node; 0, the root, where no draft is right.
    """
    right = tokens == choice[parents]
    right[0] = True  # the root was chosen before the tree was drawn
    on_path = (right | ~ancestors).all(-1)  # [N]
    return on_path.nonzero()[-1, 0]
