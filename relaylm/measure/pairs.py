r"""How much positions know of each other, by distance and by time.

For two masked positions p and q of a row in which a share t of the positions is masked,

    I(p; q | z)  =  E_{x_p}  KL( p(x_q | z, x_p)  ||  p(x_q | z) ),

which takes two network calls: one on z, one on z with x_p written. With x_p from text it is measured on text; with rows
that the model itself wrote it is measured on the model's own trajectories, since at T = infinity the masked positions
of a trajectory are a uniformly random set, whatever the tokens. `core.pairs` has the table of the means, and what it
predicts of writing positions together.

Shapes: N rows, L positions, B rows of a call, K masked positions asked for, V vocabulary, S shares, D bins of distance.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from relaylm.console import progress_bar, terminal_width, wrapped
from relaylm.console import table as text_table
from relaylm.core.noise import uniforms
from relaylm.core.pairs import PairTable, default_spacing
from relaylm.core.schedule import Spacing
from relaylm.errors import UserError
from relaylm.files import amend_folder, read_object
from relaylm.measure.likelihood import kl, log_probabilities
from relaylm.models.folder import MANIFEST, PAIRS
from relaylm.sampling.policy import check_whole

SHARES = (0.02, 0.1, 0.25, 0.45, 0.65, 0.85, 0.98)
_CELLS = 1 << 26  # logits that are in memory at once, at most


def distance_bins(length: int) -> np.ndarray:
    """Lower ends of the bins: each distance up to 8, then steps of about a sixth."""
    edges = [1]
    while edges[-1] < length - 1:
        edges.append(max(edges[-1] + 1, round(edges[-1] * 7 / 6)))
    return np.array([edge for edge in edges if edge < max(2, length)])


@torch.inference_mode()
def measure_pairs(
    model: Any,
    rows_NL: np.ndarray,
    mask_id: int,
    *,
    shares: Sequence[float] = SHARES,
    seed: int = 0,
    device: torch.device | str = "cpu",
    name: str = "",
    source: str = "text",
    batch_size: int | None = None,
    progress: bool = False,
) -> PairTable:
    """The table of one denoiser on rows of tokens, each row once at every share with a position p of its own."""
    check_whole({name or "the model": model})
    n, length = rows_NL.shape
    if n < 2 or length < 2:
        raise UserError(f"pairs need at least 2 rows of at least 2 positions, not {n} of {length}")
    edges = distance_bins(length)
    order_NL = np.argsort(uniforms(seed, np.arange(n), length), axis=1)
    size = int(getattr(model, "vocab_size", mask_id + 1))
    batch = batch_size or max(1, min(n, 32, _CELLS // (length * size)))
    sums = np.zeros((len(shares), len(edges), 3))  # of row means: count, sum, sum of squares
    with progress_bar("pairs", len(shares) * n, "row", progress) as bar:
        for s, share in enumerate(shares):
            masked = min(length, max(2, round(share * length)))
            for start in range(0, n, batch):
                rows = slice(start, min(n, start + batch))
                # Position p is the first of the masked ones; the others are asked for before and after it is written.
                places = torch.from_numpy(order_NL[rows, :masked].copy()).to(device)
                tokens = torch.from_numpy(rows_NL[rows].astype(np.int64)).to(device)
                before = tokens.scatter(1, places, mask_id)
                after = before.scatter(1, places[:, :1], tokens.gather(1, places[:, :1]))
                t_B = torch.full((len(before),), masked / length, dtype=torch.float32, device=device)
                old, new = (log_probabilities(model, x, t_B, places[:, 1:], mask_id) for x in (before, after))
                nats = kl(new, old).clamp_min(0).cpu().numpy()
                far = (places[:, 1:] - places[:, :1]).abs().cpu().numpy()
                bins = np.searchsorted(edges, far, side="right") - 1
                for nats_K, bins_K in zip(nats, bins, strict=True):
                    count_D = np.bincount(bins_K, minlength=len(edges))
                    mean_D = np.bincount(bins_K, nats_K, len(edges)) / np.maximum(count_D, 1)
                    there_D = count_D > 0
                    sums[s] += np.stack([there_D, mean_D, mean_D**2], axis=1) * there_D[:, None]
                bar.update(rows.stop - rows.start)
    count, mean = sums[..., 0], sums[..., 1] / np.maximum(sums[..., 0], 1)
    variance = np.maximum(sums[..., 2] - count * mean**2, 0) / np.maximum(count - 1, 1)
    columns = np.arange(len(edges))
    for row, there in zip(mean, count > 0, strict=True):  # bins that no row hit are as the nearest distances that were
        if there.any():
            row[:] = np.interp(columns, columns[there], row[there])
    return PairTable(np.asarray(shares), edges, mean, np.sqrt(variance / np.maximum(count, 1)), n, name, source)


def keep_pairs(folder: Path, table: PairTable) -> Spacing:
    """Keep a table in the folder of a family, and make the spacing that is predicted to lose no more than T = L uniform
    steps its default, which is returned."""
    manifest = read_object(folder / MANIFEST)
    spacing = default_spacing(table, int(manifest["length"]))
    amend_folder(folder, PAIRS, table.to_json())
    amend_folder(folder, MANIFEST, {**manifest, "meta": {**manifest.get("meta", {}), "spacing": str(spacing)}})
    return spacing


def render(table: PairTable) -> str:
    """The table as text: nats by distance, a column for each masked share (a narrow terminal gets every second one)."""
    head = ["distance", *(f"{100 * share:g}% masked" for share in table.shares_S)]
    last = [*(table.edges_D[1:] - 1), None]
    rows = []
    for d, (low, high) in enumerate(zip(table.edges_D, last, strict=True)):
        label = f"{low}+" if high is None else f"{low}" if low == high else f"{low}-{high}"
        cells = zip(table.nats_SD[:, d], table.error_SD[:, d], strict=True)
        rows.append([label, *(f"{nats:.4f}" + (f"±{1.96 * error:.4f}" if error else "") for nats, error in cells)])
    what = (
        f"Mutual information of two masked positions in nats, {table.model} on {table.rows} rows of {table.source}; "
        "± 1.96 standard errors where more than one row had such a pair"
    )
    width = terminal_width()
    return "\n".join([*wrapped([what], width), "", text_table(head, rows, width, spare=(*head[1::2], *head[2::2]))])


def render_choices(choices: Mapping[str, Mapping[str, Any]]) -> str:
    """Spacings that were asked for, with what they cost and are predicted to lose."""
    head = ["", "spacing", "calls a row", "predicted loss, nats x 100"]
    rows = [
        [label, c["spacing"], f"{c['calls']:.1f}", f"{100 * c['predicted_loss']:.2f}"] for label, c in choices.items()
    ]
    return text_table(head, rows, text=(0, 1))
