"""Replay: what `auto` chooses today, held against times that races recorded (backends.py --out). Times nothing.

    python benchmarks/replay.py FILE.json ... [--gpu h200] [--only mla16//verify] [--without fa3,flashmla]

Every backend is taken to be there but those of --without. A need is judged by the geometric means of its workloads:
the backend that `auto` takes against the best one, in decode the best of those that can be recorded. A later file's
time replaces that of an earlier one in the same job on the same page size; a time on the page that the plan has comes
before all others.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from backends import Job, arguments, by_need, jobs

from nibble.attention.backends import all_backends
from nibble.evals.tune import Result, entrants, initial_result
from nibble.hardware import lookup_gpu

Records = dict[tuple[str, str, str | None], dict[int, dict[str, Any]]]


def read(paths: list[Path]) -> Records:
    """Return cells that have a time, by job, backend and what was staged, and by page size."""
    records: Records = {}
    cells = (cell for path in paths for cell in json.loads(path.read_text())["cells"])
    for cell in (cell for cell in cells if cell["ms"] is not None):
        records.setdefault((cell["job"], cell["backend"], cell["stage_to"]), {})[cell["page"]] = cell
    return records


def replayed(job: Job, records: Records) -> Iterator[Result]:
    """Yield the results of a job, with the places and the choice of today."""
    for entrant in entrants(job.request, job.plan, job.part, job.work.phase):
        pages = records.get((job.name, *entrant.route.key), {})
        page = entrant.page if entrant.page in pages else next(iter(pages), None)
        if page is not None:
            yield replace(
                initial_result(job.plan, job.part, entrant, job.work), page=page, ms=pages[page]["ms"]
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--gpu", default="h200", help="the machine that the times are of")
    parser.add_argument("--only", help="as in backends.py")
    parser.add_argument("--without", default="", help="backends that are not installed")
    options = parser.parse_args()
    records, race = read(options.files), arguments().parse_args([])
    race.only = options.only
    names, without = {job for job, _, _ in records}, options.without.split(",")
    table = {name: info for name, info in all_backends().items() if name not in without}
    raced = [job for job in jobs(race, lookup_gpu(options.gpu), table) if job.name in names]
    results = {job.name: again for job in raced if (again := list(replayed(job, records)))}
    if not results:
        parser.error("these files have no time of a need and a backend that are raced today")
    print(by_need(results))


if __name__ == "__main__":
    main()
