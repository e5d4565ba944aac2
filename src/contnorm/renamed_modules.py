"""The modules of version 0.1, and where their content is since version 0.2.

An import of one of them fails with an error that names the new module. ``contnorm.lazy_names.RenamedModules`` asks this
module after an import has failed, and docs/migrating.md has the same table.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from types import MappingProxyType

__all__ = ["RENAMED", "new_module", "rename_message"]

# New names by package and old name, without `contnorm.` and the package. An empty name is the package itself.
_BY_PACKAGE: Mapping[str, Mapping[str, str]] = {
    "": {
        "catalog": "registry",
        "census": "bench.metrics.memory_stats",
        "config": "bench.config.schema",
        "conversion": "convert.conversion",
        "escape": "bench.escape",
        "factory": "registry",
        "fingerprint": "bench.fingerprint",
        "freezing": "moments.freeze",
        "keys": "bench.config.schema",
        "local_imports": "bench.local_imports",
        "methods": "bench.strategies.registry",
        "modes": "moments.freeze",
        "networks": "bench.models",
        "oracle": "moments.reestimate",
        "own_code": "bench.user_code",
        "plan": "bench.plan",
        "probe": "convert.norm_comparison",
        "recognition": "convert.detect",
        "record_checks": "bench.record_checks",
        "references": "convert.selection",
        "results": "bench.records",
        "seeds": "bench.rng",
        "signals": "bench.signals",
        "trust": "bench.user_code",
    },
    "cli": {
        "benching": "cli.speed",
        "beside": "cli.paper_tables",
        "building": "cli.data",
        "choosing": "paper.cells",
        "comparing": "cli.compare",
        "data_progress": "bench.data.progress",
        "diagnosing": "cli.diagnose",
        "fitting": "cli.tables",
        "garbage": "cli.common",
        "listing": "cli.ls",
        "paper_data": "cli.paper_tables",
        "paper_list": "cli.paper",
        "paper_records": "paper.recipe_runs",
        "report_files": "report.report",
        "reporting": "cli.report",
        "run_tables": "report.run_tables",
        "running": "cli.run",
        "settings": "bench.config.defaults",
        "showing": "cli.show",
        "tuning": "cli.tune",
        "typed_settings": "bench.config.sources",
    },
    "comparison": {
        "": "bench.comparison",
        "claims": "paper.claims",
        "intervals": "bench.stats",
        "lines": "paper.tables",
        "lost": "paper.tables",
        "measured": "paper.measured",
        "pairs": "bench.stats",
        "precisions": "paper.tables",
        "verdicts": "paper.published",
        "words": "paper.format",
    },
    "engine": {
        "": "bench.engine",
        "advance": "bench.engine.cuda_graph",
        "checkpoint": "bench.engine.checkpoint",
        "claims": "bench.engine.lock",
        "code_state": "bench.engine.code_state",
        "code_version": "bench.engine.provenance",
        "compiling": "bench.engine.cuda_graph",
        "evaluate": "bench.engine.evaluate",
        "half_weights": "bench.engine.precision",
        "jobs": "bench.engine.job",
        "lane": "bench.engine.trainer",
        "loop": "bench.engine.loop",
        "numerics": "bench.engine.precision",
        "optimizers": "bench.engine.optimizers",
        "packing": "bench.engine.checkpoint",
        "plans": "bench.plan",
        "processes": "bench.engine.process_pool",
        "resolving": "bench.config.resolve",
        "rows": "bench.engine.step_tensors",
        "runs": "bench.engine.scheduler",
        "saving": "bench.engine.checkpoint",
        "settling": "bench.config.defaults",
        "trial": "bench.engine.preflight",
        "unfinished": "bench.engine.run_dir",
        "user_random": "bench.engine.global_generators",
        "weights": "bench.engine.checkpoint",
    },
    "kernels": {
        "activation": "kernels.reference",
        "beside": "kernels.side_stream",
        "by_torch": "kernels.triton.availability",
        "fused": "kernels.triton.continual",
        "fused.backward": "kernels.triton.continual.backward",
        "fused.eager": "kernels.triton.continual",
        "fused.forward": "kernels.triton.continual.forward",
        "fused.launch": "kernels.triton.continual.launch",
        "fused.operators": "kernels.triton.continual.operators",
        "fused.plan": "kernels.triton.continual.plan",
        "fused.tiles": "kernels.triton.continual.tiles",
        "group_step": "kernels.triton.group_norm",
        "group_step_device": "kernels.triton.group_norm_device",
        "launching": "kernels.triton.launcher",
        "layout": "kernels.reference",
        "max_pool": "kernels.triton.max_pool",
        "max_pool_device": "kernels.triton.max_pool_device",
        "picture_views": "kernels.triton.augment",
        "picture_views_device": "kernels.triton.augment_device",
        "rows": "kernels.triton.row_moments",
        "rows.functions": "kernels.triton.row_moments",
        "rows.launch": "kernels.triton.row_moments",
        "rows.renorm_kernels": "kernels.triton.batch_renorm_device",
        "rows.row_kernels": "kernels.triton.row_moments_device",
        "rows.switch_kernels": "kernels.triton.switch_norm_device",
        "triton_here": "kernels.triton.availability",
        "variants": "kernels.triton.cn_variants",
    },
    "memories": {
        "": "bench.memories",
        "base": "bench.memories.base",
        "drawing": "bench.memories.base",
        "prs": "bench.memories.prs",
        "reservoir": "bench.memories.reservoir",
        "ring": "bench.memories.ring",
    },
    "metrics": {
        "": "bench.metrics",
        "label_stats": "bench.metrics.multilabel",
        "matrix": "bench.metrics.accuracy_matrix",
        "multilabel": "bench.metrics.multilabel",
    },
    "models": {
        "": "bench.models",
        "building": "bench.models.build",
        "deep_resnet": "bench.models.resnet",
        "mlp": "bench.models.mlp",
        "norm_check": "bench.models.norm_layers",
        "norms": "bench.models.norm_layers",
        "pretrained": "bench.models.pretrained",
        "resnet18": "bench.models.resnet",
        "weights_files": "bench.models.pretrained",
    },
    "recipes": {
        "": "paper",
        "grid": "paper.cells",
        "published": "paper.published",
        "reading": "paper.recipe",
        "recipe": "paper.recipe",
        "scores": "paper.scores",
        "selection": "paper.selection",
    },
    "report": {
        "effect": "diagnosis.result",
        "effect_figure": "diagnosis.figure",
        "effect_pair": "diagnosis.result",
        "found": "paper.recipe_runs",
        "heat_map": "report.record_figures",
        "label_figures": "report.record_figures",
        "label_views": "report.record_figures",
        "large_pages": "report.page_views",
        "memory_panels": "report.record_figures",
        "paper_sheets": "report.paper_tables",
        "plot": "report.figures",
        "sheets": "report.text_tables",
        "tried": "report.paper_tables",
        "views": "report.page_views",
    },
    "speed": {
        "": "benchmarks",
        "layers": "benchmarks.layers",
        "step": "benchmarks.step",
        "table": "benchmarks.timing",
        "timing": "benchmarks.timing",
        "whole_runs": "benchmarks.runs",
    },
    "strategies": {
        "": "bench.strategies",
        "base": "bench.strategies.base",
        "derpp": "bench.strategies.derpp",
        "er": "bench.strategies.er",
        "joining": "bench.strategies.base",
        "own": "bench.strategies.build",
    },
    "streams": {
        "": "bench.streams",
        "array_pickle": "bench.data.formats",
        "building": "bench.data.multilabel_build",
        "classification": "bench.streams.tasks",
        "coco": "bench.data.multilabel_listings",
        "copying": "bench.streams.image_store",
        "decoded_cache": "bench.data.decoded_cache",
        "decoding": "bench.data.decoding",
        "fetch": "bench.data.fetch",
        "file_state": "bench.files",
        "formats": "bench.data.formats",
        "gallery": "bench.streams.image_store",
        "id_lists": "bench.data.published",
        "image_folders": "bench.data.image_folders",
        "json_text": "bench.files",
        "listed": "bench.data.multilabel_listings",
        "manifest_check": "bench.data.multilabel_store",
        "multilabel": "bench.data.dataset",
        "nus_wide": "bench.data.multilabel_listings",
        "own_multilabel": "bench.data.multilabel_listings",
        "picture_state": "bench.data.multilabel_build",
        "published_counts": "bench.data.published",
        "published_streams": "bench.data.published",
        "readers": "bench.data.decoded_cache",
        "safe_paths": "bench.files",
        "source": "bench.data.dataset",
        "sources": "bench.data.registry",
        "stored": "bench.data.multilabel_store",
        "views": "bench.streams.transforms",
    },
}


def _pairs() -> Iterator[tuple[str, str]]:
    for package, modules in _BY_PACKAGE.items():
        for old, new in modules.items():
            yield ".".join(filter(None, ("contnorm", package, old))), f"contnorm.{new}"


RENAMED: Mapping[str, str] = MappingProxyType(dict(_pairs()))
"""The new module of each module of version 0.1 that no longer exists."""


def new_module(old: str) -> str | None:
    """Return the module that has the content of a module of version 0.1; None if its name was never in use.

    Example:
        >>> new_module("contnorm.catalog"), new_module("contnorm.unheard_of")
        ('contnorm.registry', None)
    """
    return RENAMED.get(old)


def rename_message(missing: str) -> str | None:
    """Return the message for a module that can't be imported; None if it was not a module of version 0.1.

    Args:
        missing: The name that the import system looks for. For ``import contnorm.engine.lane`` this is
            ``contnorm.engine``; the message is about the whole name.

    Example:
        >>> rename_message("contnorm.oracle")
        'contnorm.oracle was moved to contnorm.moments.reestimate in version 0.2. docs/migrating.md lists all modules.'
    """
    name = _imported_name(missing)
    old = name if name in RENAMED else missing
    if old not in RENAMED:
        return None
    return f"{old} was moved to {RENAMED[old]} in version 0.2. docs/migrating.md lists all modules."


def _imported_name(missing: str) -> str:
    """Return the name in the import statement, from the frames of the import system; ``missing`` if there are none.

    The import system imports the packages of a dotted name one by one, and does not tell a finder the whole name.
    """
    name, frame = missing, sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>" and frame.f_code.co_name == "_find_and_load":
            wanted = str(frame.f_locals.get("name", ""))
            if not wanted.startswith(f"{name}.") and wanted != name:
                break  # an import of another module, which has led to this one
            name = wanted
    return name
