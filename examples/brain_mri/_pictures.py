"""The pictures of the report."""

from __future__ import annotations

import math
from pathlib import Path

import matplotlib as mpl
import torch
from matplotlib import pyplot as plt

from brain_mri._checks import LOSS_TOLERANCE, MEMORY_BOUND, loss_differences, n_rows
from brain_mri._options import SHARD_DIMS
from brain_mri._record import Run

MEBIBYTE = 2**20
ONE, SPLIT, ACCENT, GREY = "#33415c", "#2a9d8f", "#e76f51", "#8d99ae"
STYLE = {
    "axes.edgecolor": GREY,
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "figure.dpi": 150,
    "font.size": 9,
    "grid.alpha": 0.25,
    "legend.frameon": False,
}


def draw_all(reference: Run, run: Run, folder: Path) -> None:
    """Draw ``loss.png``, ``memory.png`` and ``slices.png``.

    Parameters
    ----------
    reference, run : Run
        Of one process, and of many.
    folder : Path
        Where the pictures go.
    """
    mpl.use("Agg")  # no window, and no display needed
    with mpl.rc_context(STYLE):
        draw_losses(reference, run, folder / "loss.png")
        draw_memory(reference, run, folder / "memory.png")
        draw_slices(reference, run, folder / "slices.png")


def draw_losses(reference: Run, run: Run, path: Path) -> None:
    """Both losses at every step, and their difference under the tolerance."""
    steps = range(1, len(run.record.losses) + 1)
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.5, 3.4), layout="constrained")
    left.plot(steps, reference.record.losses, color=ONE, linewidth=2, label="one process")
    left.plot(steps, run.record.losses, "o", color=ACCENT, markersize=4.5, label=f"{len(run.ranks)} ranks")
    left.set(title="Loss", xlabel="step", ylim=(0, None))
    left.legend()
    dtype = str(run.record.job["dtype"])
    tolerance = LOSS_TOLERANCE[dtype]
    floor = {"float32": 2e-8, "float64": 2e-17}[dtype]  # exact agreement has no place on a logarithmic axis
    differences = [max(difference, floor) for difference in loss_differences(reference, run)]
    right.semilogy(steps, differences, "o-", color=SPLIT, markersize=4, linewidth=1.2)
    right.axhline(tolerance, color=ACCENT, linestyle="--", linewidth=1.2)
    right.annotate(
        f"tolerance {tolerance:.0e}", (1, tolerance), xytext=(0, 3), textcoords="offset points", color=ACCENT
    )
    right.set(title="Relative difference", xlabel="step")
    right.set_ylim(min(differences) / 5, tolerance * 8)
    for axes in (left, right):
        axes.xaxis.get_major_locator().set_params(integer=True)
    figure.savefig(path)
    plt.close(figure)


def draw_memory(reference: Run, run: Run, path: Path) -> None:
    """Peak of every rank as a bar, beside the single process's, with the ideal share as a line."""
    whole = reference.ranks[0].peak_bytes / MEBIBYTE
    n_samples = len({rank.ddp_rank for rank in run.ranks})
    labels = [f"one process\n{n_samples} × {sum(run.record.rows)} rows"]
    labels += [f"rank {rank.rank}\n{n_rows(rank)} rows" for rank in run.ranks]
    heights = [whole, *(rank.peak_bytes / MEBIBYTE for rank in run.ranks)]
    figure, axes = plt.subplots(figsize=(2.4 + 1.2 * len(heights), 3.6), layout="constrained")
    bars = axes.bar(range(len(heights)), heights, 0.6, color=[ONE] + [SPLIT] * len(run.ranks))
    axes.bar_label(bars, [f"{height:.0f} MiB" for height in heights], label_type="center", color="white")
    for position, rank in enumerate(run.ranks, start=1):
        ideal = whole / n_samples * n_rows(rank) / sum(run.record.rows)
        axes.hlines(ideal, position - 0.38, position + 0.38, color=ACCENT, linewidth=2, label="share of the rows")
        bound = MEMORY_BOUND * ideal
        axes.hlines(bound, position - 0.38, position + 0.38, color=ACCENT, linestyle=":", label=f"× {MEMORY_BOUND}")
    handles = {label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    axes.legend(handles.values(), handles.keys(), loc="upper right")
    axes.set_xticks(range(len(heights)), labels)
    axes.set(title="Peak memory of a training step", ylabel="MiB beyond the start", ylim=(0, 1.18 * max(heights)))
    axes.grid(axis="x", visible=False)
    figure.savefig(path)
    plt.close(figure)


def draw_slices(reference: Run, run: Run, path: Path) -> None:
    """One plane of image, maps and predictions; dashed lines are the borders between the ranks."""
    planes, borders = joined_planes(run), _borders(run)
    whole = reference.planes[0]
    difference = (planes["prediction"] - whole["prediction"]).abs()
    rows = ("grey matter", "white matter")
    columns = ("input", "target", "prediction", "|split − one process|")
    height, width = planes["image"].shape[2], planes["image"].shape[1]
    figure, grid = plt.subplots(2, 4, figsize=(10.4, 0.4 + 2 * 2.4 * height / width), layout="constrained")
    largest = max(float(difference.max()), 1e-12)
    for tissue, name in enumerate(rows):
        pictures = (planes["image"][0], planes["tissues"][tissue], planes["prediction"][tissue], difference[tissue])
        for column, picture in enumerate(pictures):
            axes = grid[tissue, column]
            is_difference = column == 3
            drawn = axes.imshow(
                picture.T,  # the second dimension upwards, as neurologists look at it
                origin="lower",
                cmap="magma" if is_difference else "gray",
                vmin=0,
                vmax=largest if is_difference else 1,
                interpolation="nearest",
            )
            for border in borders:
                line = axes.axhline if run.record.shard_dim != 2 else axes.axvline
                line(border - 0.5, color="#ffb703", linestyle=(0, (4, 3)), linewidth=1.2)
            axes.set_xticks([])
            axes.set_yticks([])
            axes.grid(visible=False)
            for spine in axes.spines.values():
                spine.set_visible(False)
            if tissue == 0:
                axes.set_title(columns[column])
            if column == 0:
                axes.set_ylabel(name)
            if is_difference:
                figure.colorbar(drawn, ax=axes, shrink=0.85, format="%.0e").outline.set_visible(False)
    figure.supxlabel(
        f"dashed: border between ranks along {SHARD_DIMS[run.record.shard_dim]}, rows {run.record.rows}", color=GREY
    )
    figure.savefig(path)
    plt.close(figure)


def joined_planes(run: Run) -> dict[str, torch.Tensor]:
    """The plane of the first sample, put together from its ranks.

    Returns
    -------
    dict of str to Tensor, (n_channels, rows, columns)
        See `RankRecord`; the split dimension is whole.
    """
    parts = [planes for rank, planes in zip(run.ranks, run.planes, strict=True) if rank.ddp_rank == 0]
    return {name: torch.cat([part[name] for part in parts], dim=_plane_dim(run)) for name in parts[0]}


def _plane_dim(run: Run) -> int:
    # An axial plane is (channel, left-right, back-front), a sagittal one (channel, back-front, foot-head).
    return {2: 1, 3: 2, 4: 2}[run.record.shard_dim]


def _borders(run: Run) -> list[int]:
    starts = {rank.start for rank in run.ranks}
    return sorted(start for start in starts if 0 < start < math.inf and start < sum(run.record.rows))
