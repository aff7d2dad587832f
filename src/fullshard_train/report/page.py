"""The HTML page of a report: a single file that contains everything it needs."""

from __future__ import annotations

import json
import os
import uuid
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from fullshard.errors import ConfigError
from fullshard_train.report.curves import curves_of
from fullshard_train.report.formatting import plain
from fullshard_train.report.palette import KEYS, PALETTES
from fullshard_train.report.record import RunRecord
from fullshard_train.report.step_timeline import StepFigure, step_figure
from fullshard_train.report.tables import (
    host_rows,
    memory_kinds,
    sent_by_wire,
    subtitle,
    summary,
    time_parts,
    unit_table,
)


def write_report(record: RunRecord, path: Path, *, others: Sequence[RunRecord] = ()) -> Path:
    """Write `record` as an HTML page to `path`, replacing any file there, and return `path`.

    With `others`, the page compares the runs. It needs no network and no other file, and is written
    completely or not at all.
    """
    page = page_of(record, others)
    path.parent.mkdir(parents=True, exist_ok=True)
    incoming = path.with_name(f".{path.name}.incoming-{uuid.uuid4().hex}")
    try:
        incoming.write_text(page, encoding="utf-8")
        os.replace(incoming, path)
    except BaseException:
        incoming.unlink(missing_ok=True)
        raise
    return path


def page_of(record: RunRecord, others: Sequence[RunRecord] = ()) -> str:
    """Return the page as text."""
    try:
        import jinja2
    except ModuleNotFoundError as error:
        raise ConfigError(
            "report: it cannot be written without jinja2; run: pip install 'fullshard[report]'"
        ) from error
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("fullshard_train", "report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["plain"] = plain
    records = _distinct([record, *others])
    curves = curves_of(records)
    step = None if others else step_figure(record)
    content = {
        "curves": {curve.key: curve.content for curve in curves},
        "step": None if step is None else step.content,
    }
    as_markup = environment.filters["safe"]
    template = environment.get_template("comparison.html.j2" if others else "report.html.j2")
    return template.render(
        title=", ".join(plain(each.title) for each in records),
        curves=curves,
        palettes=PALETTES,
        style=as_markup(_beside("report.css")),
        script=as_markup(_beside("report.js")),
        content=as_markup(_json_in_html(content)),
        **(_comparison(records) if others else _details(record, step)),
    )


def _details(record: RunRecord, step: StepFigure | None) -> dict[str, Any]:
    return {
        "record": record,
        "facts": summary(record),
        "subtitle": subtitle(record),
        "step": step,
        "legend": [(key, activity.value) for activity, key in KEYS.items()],
        "memory": memory_kinds(record),
        "times": time_parts(record),
        "hosts": host_rows(record),
        "sent": sent_by_wire(record),
        "table": unit_table(record),
        "sample": _sample(record),
        "config": _shown_config(record.config),
        "environment": record.environment,
    }


def _comparison(records: Sequence[RunRecord]) -> dict[str, Any]:
    """Return the facts of every run, and the settings that differ, by name."""
    facts = [{fact.name: fact for fact in summary(each)} for each in records]
    settings = [
        {
            f"{section}.{key}": value
            for section, keys in found.items()
            for key, value in keys.items()
        }
        for each in records
        for found in [_shown_config({**each.config, "environment": each.environment})]
    ]
    return {
        "names": [plain(each.title) for each in records],
        "sizes": [", ".join(subtitle(each)) for each in records],
        "facts": {name: [each.get(name) for each in facts] for name in _all_keys(facts)},
        "settings": {
            name: values
            for name in _all_keys(settings)
            if len(set(values := [each.get(name) for each in settings])) > 1
        },
    }


def _all_keys(found: Iterable[Mapping[str, object]]) -> list[str]:
    return list(dict.fromkeys(key for each in found for key in each))


def _distinct(records: Sequence[RunRecord]) -> list[RunRecord]:
    """Number the runs that have the same title as another one."""
    count = Counter(each.title for each in records)
    return [
        replace(each, title=f"{each.title} ({index})") if count[each.title] > 1 else each
        for index, each in enumerate(records, 1)
    ]


def _beside(name: str) -> str:
    return (files("fullshard_train.report") / name).read_text(encoding="utf-8")


def _json_in_html(content: object) -> str:
    """Return JSON that cannot close the script element that contains it."""
    text = json.dumps(content, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _sample(record: RunRecord) -> tuple[str, str]:
    """Return the prompt, if the sample begins with it, and the text after it."""
    prompt = record.config.get("run", {}).get("prompt", "")
    if isinstance(prompt, str) and record.sample.startswith(prompt):
        return plain(prompt), plain(record.sample.removeprefix(prompt))
    return "", plain(record.sample)


def _shown_config(config: Mapping[str, Mapping[str, object]]) -> dict[str, dict[str, str]]:
    return {
        plain(section): {plain(key): _shown_value(value) for key, value in keys.items()}
        for section, keys in config.items()
    }


def _shown_value(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(_shown_value(each) for each in value)
    return plain(value)
