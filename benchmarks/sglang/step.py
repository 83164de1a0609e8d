"""SGLang's own kernels for MiniMax-M3, out of unpacked wheels, and ours in their place, on one layer's steps.

    pip download --no-deps -d WHEELS sglang==0.5.16
    unzip WHEELS/sglang-0.5.16-*.whl -d DIR/0.5.16
    python benchmarks/sglang/step.py DIR/0.5.16 [DIR/0.5.23 ...]

Nothing of SGLang is installed. Its kernels, their entry functions, the backend's methods that call them and the plugin
loader that puts ours around them are the release's own code; of what a server builds before a step (pools, request
tables, the platform) only what they read is made here (release.py). The Triton that is installed must be one that the
release's kernels compile with: 3.6 for 0.5.16 to 0.5.23.

For each release and step: the relative error of the layer's output against float32 over the exact selection, SGLang's
kernels and then ours, and on a card the time of both by turns, each after the L2 cache was filled with something else;
of decodes also as a replayed CUDA graph, captured for the model's longest context as SGLang captures it, and of such a
one of `ops.batch_from_slots` by its kernel alone, which the plugin does not use yet (the graph's own launch included).
SGLang's kernels are tuned first, as a server tunes them. Its decodes select by a CUDA kernel that is built at run time
through apache-tvm-ffi and nvcc, or without that package by its own Triton kernels.

Every case runs in a process of its own. All are started at once, to compile side by side; they take times one by one.
"""

from __future__ import annotations

import argparse
import json
import logging
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from statistics import median
from threading import Timer
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from release import (
    DEVICE,
    ENTRIES,
    KERNELS,
    PAGE,
    SPARSE,
    build_topk,
    failure,
    import_backend,
    import_release,
    load_plugin,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # Triton's interpreter multiplies no bfloat16
E4M3 = torch.float8_e4m3fn
DIM, TOPK, LAYER = 128, 16, 3
MAX_CONTEXT = 524288 if DEVICE == "cuda" else 4096
CHECKED_ROWS = 128
"""A request's last query tokens, whose outputs are compared."""
ROUNDS = 30
MAX_ERROR = 5e-3
"""Of our output. One block that is another, in one row of a thousand, is more."""


class Case(NamedTuple):
    query_lens: list[int]
    prefix_lens: list[int]
    kv_heads: int
    has_8_bits: bool = False

    @property
    def is_decode(self) -> bool:
        return max(self.query_lens) == 1

    @property
    def seq_lens(self) -> list[int]:
        return [query + prefix for query, prefix in zip(self.query_lens, self.prefix_lens, strict=True)]


if DEVICE == "cuda":
    DECODES = ([1] * 32, [700 + 1523 * i for i in range(32)])
    PREFILLS = ([2048, 700, 1300, 1], [30_000, 12_345, 0, 5000])
else:
    DECODES = ([1] * 3, [2300, 127, 2047])
    PREFILLS = ([9, 3, 20, 1], [2300, 2049, 0, 130])
CASES = {
    "decode, 4 KV heads": Case(*DECODES, 4),
    "decode, 1 KV head": Case(*DECODES, 1),
    "decode, 4 KV heads, fp8": Case(*DECODES, 4, True),
    "prefill, 4 KV heads": Case(*PREFILLS, 4),
    "prefill, 1 KV head": Case(*PREFILLS, 1),
    "prefill, 4 KV heads, fp8": Case(*PREFILLS, 4, True),
}


class Step:
    """One layer's step of a case: the release's backend over pools that hold random tokens."""

    def __init__(self, root: Path, case: Case) -> None:
        self.case = case
        self.entries = import_release(root)
        self.topk = build_topk(root)
        backend_class = import_backend(root, self.entries)
        self.backend_module = sys.modules[backend_class.__module__]
        stock = {name: getattr(self.entries, name) for name in ENTRIES}
        load_plugin()
        self.functions = {"stock": stock, "ours": {name: getattr(self.entries, name) for name in ENTRIES}}
        for name in ENTRIES:
            for holder in (self.entries, self.backend_module):
                if getattr(holder, name) is stock[name]:
                    raise RuntimeError(f"SGLang's loader put no hook around {name} of {holder.__name__}")

        torch.manual_seed(0)
        self.generator = torch.Generator(DEVICE).manual_seed(0)
        cache_dtype = E4M3 if case.has_8_bits else DTYPE
        # Later releases keep index keys in 8 bits too, beside such a cache, on Hopper.
        pools = (root / "sglang/srt/mem_cache/memory_pool.py").read_text()
        index_dtype = E4M3 if case.has_8_bits and "def get_minimax_sparse_index_dtype" in pools else DTYPE
        num_requests, num_pages = len(case.seq_lens), 1 + sum(-(-length // PAGE) for length in case.seq_lens)
        slots = num_pages * PAGE
        self.k, self.v = (self.randn(slots, case.kv_heads, DIM).to(cache_dtype) for _ in range(2))
        self.index_k = self.randn(slots, 1, DIM).to(index_dtype)
        num_tokens = sum(case.query_lens)
        self.q, self.index_q = (self.randn(num_tokens, case.kv_heads * heads, DIM) for heads in (16, 1))

        pages = iter((torch.randperm(num_pages - 1) + 1).split([-(-n // PAGE) for n in case.seq_lens]))
        rows = torch.randperm(num_requests + 3)[:num_requests]
        req_to_token = torch.zeros((num_requests + 3, MAX_CONTEXT), dtype=torch.int32)
        self.block_table = torch.zeros((num_requests, -(-max(case.seq_lens) // PAGE)), dtype=torch.int32)
        for i, (row, length) in enumerate(zip(rows.tolist(), case.seq_lens, strict=True)):
            own = next(pages)
            self.block_table[i, : len(own)] = own
            req_to_token[row, :length] = (own[:, None] * PAGE + torch.arange(PAGE)).flatten()[:length]
        self.block_table = self.block_table.to(DEVICE)

        backend: Any = backend_class.__new__(backend_class)
        backend.kv_pool = SimpleNamespace(
            set_fused_kv_index_buffer=lambda *_: None,  # the step's own tokens are there already
            get_kv_buffer=lambda _: (self.k, self.v),
            get_index_k_buffer=lambda _: self.index_k,
        )
        backend.req_to_token = req_to_token.to(DEVICE)
        backend.max_context_len = MAX_CONTEXT
        backend.disable_value_layer_ids = {LAYER}
        backend.score_type, backend.page_size = "max", PAGE
        backend.block_size_q, backend.block_size_k, backend.topk_blocks = 1, PAGE, TOPK
        backend.init_blocks, backend.local_blocks = 0, 1
        for switch in ("use_msa", "_use_msa_decode", "_msa_owns_decode", "use_dense_sparse_decode"):
            setattr(backend, switch, False)
        self.backend = backend
        seq_lens = torch.tensor(case.seq_lens)
        mode = SimpleNamespace(is_decode_or_idle=lambda: case.is_decode, is_target_verify=lambda: False)
        self.batch = SimpleNamespace(
            forward_mode=mode,
            seq_lens=seq_lens.to(DEVICE),
            seq_lens_cpu=seq_lens,
            req_pool_indices=rows.to(DEVICE),
            out_cache_loc=None,
            minimax_m3_precached_sparse_layers=None,
        )
        if not case.is_decode:
            self.batch.extend_seq_lens = torch.tensor(case.query_lens, dtype=torch.int32, device=DEVICE)
            self.batch.extend_prefix_lens = torch.tensor(case.prefix_lens, dtype=torch.int32, device=DEVICE)
            self.batch.extend_seq_lens_cpu = case.query_lens
        scales = dict.fromkeys(f"{index}{x}_scale_float" for index in ("", "idx_") for x in "qkv")
        self.layer = SimpleNamespace(layer_id=LAYER, scaling=DIM**-0.5, **scales)
        self.describe()

    def describe(self, *, in_capture: bool = False) -> None:
        """Captured graphs of decodes are described by the longest context there may be."""
        self.backend.init_forward_metadata_out_graph(self.batch, in_capture)

    def randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator, device=DEVICE).to(DTYPE)

    def run(self, who: str) -> torch.Tensor:
        """The layer's output [T, Hq * D], as SGLang's backend calls "stock" or "ours"."""
        for holder in (self.entries, self.backend_module):
            holder.__dict__.update(self.functions[who])
        forward = self.backend.forward_decode if self.case.is_decode else self.backend.forward_extend
        index = {"idx_q": self.index_q, "idx_k": None, "idx_v": None}
        output: torch.Tensor = forward(self.q, None, None, self.layer, self.batch, **index)[1]
        return output

    def checked(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows that are compared, and float32 over the exact selection for them."""
        from msaserve import ops

        starts = torch.tensor([0, *self.case.query_lens]).cumsum(0).tolist()
        rows = torch.cat([torch.arange(max(a, b - CHECKED_ROWS), b) for a, b in pairwise(starts)])
        rows = rows.to(DEVICE)
        lens = [min(n, CHECKED_ROWS) for n in self.case.query_lens]
        cu_query_lens = torch.tensor([0, *lens], device=DEVICE).cumsum(0).int()
        where = (self.block_table, self.batch.seq_lens.int(), cu_query_lens)
        k, v, index_k = (x.view(-1, PAGE, *x.shape[1:]) for x in (self.k, self.v, self.index_k))
        block_ids = ops.select_blocks(
            self.index_q[rows].float(),
            index_k[:, :, 0].float(),
            *where,
            topk=TOPK,
            max_query_len=max(lens),
            max_seq_len=max(self.case.seq_lens),
            impl="reference",
        )
        options: dict[str, Any] = {"max_query_len": max(lens), "impl": "reference"}
        attended = ops.sparse_attend(self.q[rows].float(), k.float(), v.float(), block_ids, *where, **options)
        return rows, attended.flatten(1)

    def prepare(self) -> None:
        """What ours need before they select, of a decode captured for the longest context."""
        from msaserve import ops

        where = (self.backend.req_to_token, self.batch.req_pool_indices, self.batch.seq_lens)
        ops.batch_from_slots(*where, block_size=PAGE, max_blocks=MAX_CONTEXT // PAGE, impl="triton")

    def capture_preparation(self) -> torch.cuda.CUDAGraph:
        self.prepare()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.prepare()
        return graph

    def capture(self, who: str) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        self.describe(in_capture=True)
        self.run(who)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = self.run(who)
        self.describe()
        return graph, output


def autotuners() -> Iterator[Any]:
    """Of the release's kernels."""
    for name, kernels in list(sys.modules.items()):
        if name.startswith(KERNELS):
            for kernel in vars(kernels).values():
                while hasattr(kernel, "fn") and hasattr(kernel, "run"):
                    if hasattr(kernel, "configs"):
                        yield kernel
                    kernel = kernel.fn


def by_turns(calls: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Median microseconds of each."""
    other = torch.zeros(1 << 28, dtype=torch.uint8, device=DEVICE)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(ROUNDS + 2):
        for name, call in calls.items():
            other.sum()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            torch.cuda.synchronize()
            if turn >= 2:
                times[name].append(start.elapsed_time(end) * 1e3)
    return {name: median(found) for name, found in times.items()}


def can_go_on() -> bool:
    """Not after an illegal access, which leaves nothing of a process's card."""
    try:
        torch.cuda.synchronize()
    except Exception:
        return False
    return True


def one_case(root: Path, name: str, is_timed: bool) -> dict[str, Any]:
    """What `main` prints of one case. When everything is compiled it says so and waits for its turn to take times."""
    from msaserve.integrations.sglang import attention
    from msaserve.ops.testing import relative_error

    said: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = said.append  # type: ignore[method-assign]
    attention.logger.addHandler(handler)
    attention.logger.setLevel(logging.INFO)
    case = CASES[name]
    step = Step(root, case)
    if DEVICE == "cpu":
        attention._capability = lambda device: (9, 0)
        for tuner in autotuners():
            del tuner.configs[:-1]  # the interpreter is not worth tuning for; the last works for every shape
    rows, expected = step.checked()
    result: dict[str, Any] = {"topk": step.topk, "error": {}, "eager": {}, "replayed": {}, "failed": {}}
    result["preparation"] = None
    working = []
    for who in ("ours", "stock"):
        try:
            errors = []
            for in_capture in (False, True) if case.is_decode else (False,):
                step.describe(in_capture=in_capture)
                errors.append(relative_error(step.run(who)[rows].float(), expected))
            result["error"][who] = max(errors)
            working.append(who)
        except Exception as error:
            result["failed"][who] = failure(error)
            is_timed &= can_go_on()
    result["fell_back"] = [record.getMessage() for record in said if record.levelno >= logging.WARNING]
    result["took"] = any(record.levelno == logging.INFO for record in said) and not result["fell_back"]
    if not is_timed:
        return result
    torch.cuda.empty_cache()
    print("ready", flush=True)
    sys.stdin.readline()
    # What was tuned beside the other cases may be tuned wrong.
    for tuner in autotuners():
        tuner.cache.clear()
    step.describe()
    for who in working:
        step.run(who)
    result["eager"] = by_turns({who: lambda who=who: step.run(who) for who in working})
    if case.is_decode:
        graphs = {}
        for who in working:
            try:
                graph, output = step.capture(who)
                output.fill_(float("nan"))
                graph.replay()
                result["error"][who] = max(result["error"][who], relative_error(output[rows].float(), expected))
                graphs[who] = graph
            except Exception as error:
                result["failed"][who] = f"not captured: {failure(error)}"
        try:
            graphs["preparation"] = step.capture_preparation()
        except Exception as error:
            result["failed"]["batch_from_slots"] = failure(error)
        result["replayed"] = by_turns({who: graph.replay for who, graph in graphs.items()})
        result["preparation"] = result["replayed"].pop("preparation", None)
    result["fell_back"] = [record.getMessage() for record in said if record.levelno >= logging.WARNING]
    return result


class Process:
    """A case's own process."""

    def __init__(self, root: Path, name: str, is_timed: bool) -> None:
        command = [sys.executable, __file__, str(root), "--one", name, *(["--no-times"] if not is_timed else [])]
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115, its life is the process's
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self.errors}
        self.process = subprocess.Popen(command, text=True, **pipes)  # type: ignore[call-overload]
        self.is_ready = False

    def read(self, timeout: float) -> dict[str, Any] | None:
        """Its result; None when it is ready to take times, or when it failed."""
        timer = Timer(timeout, self.process.kill)
        timer.start()
        try:
            for line in self.process.stdout:
                if line == "ready\n":
                    self.is_ready = True
                    return None
                if line.startswith("{"):
                    found: dict[str, Any] = json.loads(line)
                    return found
            return None
        finally:
            timer.cancel()

    def go(self) -> None:
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()

    def failure(self) -> str:
        """Of a process that ended without a result; all it said goes to stderr."""
        self.errors.seek(0)
        text = self.errors.read()
        print(text[-3000:], file=sys.stderr, flush=True)
        errors = [line for line in text.splitlines() if "Error: " in line]
        return errors[-1][:160] if errors else f"exit code {self.process.returncode}"


def is_right(found: dict[str, Any]) -> bool:
    """Whether both ran, and ours took the call and computed what it means."""
    return found["took"] and not found["fell_back"] and not found["failed"] and found["error"]["ours"] <= MAX_ERROR


def row(release: str, name: str, found: dict[str, Any]) -> str:
    def both(figures: dict[str, float], shown: str) -> str:
        return " → ".join(f"{figures[who]:{shown}}" if who in figures else "–" for who in ("stock", "ours"))

    def times(figures: dict[str, float]) -> str:
        if not figures:
            return ""
        ratio = f" ({figures['stock'] / figures['ours']:.2f}×)" if len(figures) == 2 else ""
        return both(figures, ",.0f") + ratio

    took = "yes" if found["took"] and not found["fell_back"] else f"NO: {'; '.join(found['fell_back'])}"
    failed = "".join(f"; {who} {why}" for who, why in found["failed"].items())
    prepared = "" if found["preparation"] is None else f"{found['preparation']:.1f}"
    figures = [both(found["error"], ".5f"), times(found["eager"]), times(found["replayed"]), prepared]
    cells = [release, name, *figures, took + failed]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("roots", type=Path, nargs="+", metavar="DIR", help="an unpacked release, named as its version")
    parser.add_argument("--only", default="", metavar="TEXT", help="the cases whose names have this in them")
    parser.add_argument("--no-times", action="store_true", help="errors only, as without a card")
    parser.add_argument(
        "--jobs", type=int, default=16 if DEVICE == "cuda" else 1, help="processes at once (%(default)s)"
    )
    parser.add_argument("--timeout", type=float, default=400, help="seconds for a case to get ready (%(default)s)")
    parser.add_argument("--one", choices=CASES, metavar="CASE", help="one case in this process, its result as JSON")
    args = parser.parse_args()
    is_timed = DEVICE == "cuda" and not args.no_times
    if args.one is not None:
        print(json.dumps(one_case(args.roots[0], args.one, is_timed)), flush=True)
        return
    for root in args.roots:
        if not (root / f"{SPARSE.replace('.', '/')}_backend.py").is_file():
            parser.error(f"{root} has no {SPARSE}_backend: unzip sglang's wheel there, 0.5.16 or later")
    print(f"{DEVICE}, torch {torch.__version__}; SGLang's own → ours; µs, and how many times as fast\n")
    print(
        "| SGLang | step | error | eager | replayed | batch_from_slots | ours took it |\n|---|---|---|---|---|---|---|",
        flush=True,
    )
    jobs = [(root, name) for root in args.roots for name in CASES if args.only in name]

    def start(job: tuple[Path, str]) -> tuple[Process, dict[str, Any] | None]:
        process = Process(*job, is_timed)
        return process, process.read(args.timeout)

    has_failed = False
    topk: dict[str, str] = {}
    with ThreadPoolExecutor(args.jobs) as pool:
        waiting = pool.map(start, jobs)
        # None may take times while another compiles and tunes.
        for (root, name), (process, found) in zip(jobs, list(waiting) if is_timed else waiting, strict=True):
            if process.is_ready:
                process.go()
                found = process.read(args.timeout)
            process.end()
            if found is not None and CASES[name].is_decode:
                topk[root.name] = found["topk"]
            has_failed |= found is None or not is_right(found)
            shown = f"| {root.name} | {name} | {process.failure()} |" if found is None else row(root.name, name, found)
            print(shown, flush=True)
    for release, what in topk.items():
        print(f"\nDecodes of {release} select by {what}.")
    sys.exit(has_failed)


if __name__ == "__main__":
    main()
