"""The report: what ran, whether the two runs agree, what it cost."""

from __future__ import annotations

import statistics
from collections import defaultdict
from pathlib import Path

from brain_mri._checks import Check, compare, loss_differences, memory_shares, n_rows
from brain_mri._pictures import MEBIBYTE, draw_all
from brain_mri._record import Communication, Run


def write_report(reference: Run, run: Run, folder: Path) -> list[Check]:
    """Write ``report.md`` and its pictures.

    Parameters
    ----------
    reference, run : Run
        Of one process, and of many.
    folder : Path
        Made if missing.

    Returns
    -------
    list of Check
        What the verdict is made of.
    """
    folder.mkdir(parents=True, exist_ok=True)
    checks = compare(reference, run)
    draw_all(reference, run, folder)
    sections = [
        _head(reference, run),
        _verdict(reference, run, checks),
        "## Loss\n\n![Loss of both runs at every step, and their relative difference](loss.png)",
        _losses(reference, run),
        "## Memory\n\n![Peak memory of every rank against the single process](memory.png)",
        _memory(reference, run),
        "## Prediction\n\n![Input, target and prediction with the border between ranks](slices.png)\n\n"
        "The unchanged volume after the last step. Each rank wrote its own part of the plane.",
        _communication(run),
    ]
    (folder / "report.md").write_text("\n\n".join(sections) + "\n", encoding="utf-8")
    return checks


def _head(reference: Run, run: Run) -> str:
    job = run.record.job
    shape = job["shape"]
    assert isinstance(shape, list)
    voxels = "×".join(map(str, shape))
    rows = ", ".join(map(str, run.record.rows))
    return f"""# One brain, {len(run.record.rows)} ranks

An unmodified MONAI `BasicUNet` with features {job["features"]} learns the grey- and white-matter maps of the MNI152
brain: {voxels} voxels of {job["resolution"]} mm, {job["n_samples"]} sample(s) per step, {job["steps"]} steps of AdamW,
{job["dtype"]}. The reference is one process with plain tensors; the other run splits every sample along dim
{run.record.shard_dim} into {rows} rows.

| | processes | device | threads each | median step |
|---|--:|---|--:|--:|
| one process | 1 | {reference.record.device} | {reference.record.threads} | {_median_seconds(reference):.2f} s |
| split | {len(run.ranks)} | {run.record.device} | {run.record.threads} | {_median_seconds(run):.2f} s |"""


def _verdict(reference: Run, run: Run, checks: list[Check]) -> str:
    worst = max(loss_differences(reference, run))
    word = "**PASS**" if all(check.has_passed for check in checks) else "**FAIL**"
    lines = [
        "## Verdict",
        "",
        f"{word}: the losses differ by at most {worst:.2e} (relative) in any of {len(run.record.losses)} steps.",
        "",
        "| | | measured |",
        "|---|---|---|",
    ]
    lines += [f"| {'✓' if check.has_passed else '✗'} | {check.name} | {check.detail} |" for check in checks]
    return "\n".join(lines)


def _losses(reference: Run, run: Run) -> str:
    differences = loss_differences(reference, run)
    rows = [
        f"| {step} | {whole:.7f} | {split:.7f} | {difference:.1e} |"
        for step, (whole, split, difference) in enumerate(
            zip(reference.record.losses, run.record.losses, differences, strict=True), start=1
        )
    ]
    table = "\n".join(["| step | one process | split | relative difference |", "|--:|--:|--:|--:|", *rows])
    return f"<details><summary>Every step</summary>\n\n{table}\n\n</details>"


def _memory(reference: Run, run: Run) -> str:
    whole = reference.ranks[0].peak_bytes / MEBIBYTE
    lines = [
        "Peak of torch's allocator during one step minus its value at the start. Parameters, optimizer state and the",
        "sample itself exist before and do not count.",
        "",
        "| | rows | peak | over its share of one process |",
        "|---|--:|--:|--:|",
        f"| one process | {sum(run.record.rows)} | {whole:.1f} MiB | |",
    ]
    for rank, share in zip(run.ranks, memory_shares(reference, run), strict=True):
        lines.append(
            f"| rank {rank.rank} | {n_rows(rank)} | {rank.peak_bytes / MEBIBYTE:.1f} MiB "
            f"| {'no rows' if share != share else f'{share:.3f} ×'} |"
        )
    return "\n".join(lines)


def _communication(run: Run) -> str:
    """Sums over ranks, per step, the largest payload first."""
    steps = len(run.record.losses)
    groups: dict[tuple[str, str, str], list[Communication]] = defaultdict(list)
    for rank in run.ranks:
        for row in rank.communication:
            groups[row.operator, row.collective, row.axis].append(row)
    rows = sorted(groups.items(), key=lambda item: -sum(row.bytes_sent for row in item[1]))
    total = sum(row.bytes_sent for _, members in rows for row in members) / steps
    lines = [
        "## Communication",
        "",
        f"Per step {total / MEBIBYTE:.2f} MiB leave all ranks together. Calls and time are of the busiest rank; time",
        "includes waiting for slower ranks. Gradients that DDP averages over samples are its own, not in this table.",
        "",
        "| operator | collective | axis | calls per step | sent by all ranks, KiB per step | ms per step |",
        "|---|---|---|--:|--:|--:|",
    ]
    for (operator, collective, axis), members in rows:
        calls = max(row.n_calls for row in members) / steps
        sent = sum(row.bytes_sent for row in members) / steps / 1024
        milliseconds = 1e3 * max(row.seconds for row in members) / steps
        lines.append(f"| `{operator}` | {collective} | {axis} | {calls:.3g} | {sent:,.1f} | {milliseconds:.1f} |")
    return "\n".join(lines)


def _median_seconds(run: Run) -> float:
    measured = run.record.measured_step
    seconds = [value for step, value in enumerate(run.record.seconds) if step != measured]
    return statistics.median(seconds or run.record.seconds)
