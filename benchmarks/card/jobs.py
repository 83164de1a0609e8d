"""What is run on a card, in the order of the default list: first what measures time, which nothing else runs beside.

`seen(seconds)`: measured on one of two H200s with 32 cores, nothing compiled yet, the training on the other card. Other
seconds are guesses until the summary of a run says better.
"""

from __future__ import annotations

from functools import partial

from benchmarks.card.run import Job

OPS = "{python} benchmarks/ops"
VLLM = "{python} {root}/benchmarks/vllm"
TYRO = ("tyro", "docstring_parser")
MODEL = ("msgspec", "safetensors")
ASKED = (*MODEL, "tokenizers", "jinja2", "llguidance")
HTTP = ("httpcore", "httptools", "httpx", "starlette", "uvicorn", "grpc", "grpc_health", "smg_grpc_proto")
TEXT_GATEWAY = (*ASKED, *TYRO, *HTTP, "prometheus_client", "psutil")
GATEWAY = (*TEXT_GATEWAY, "av")
TESTS = (*ASKED, "pytest", "xdist", "pytest_timeout", "pytest_asyncio", "hypothesis")
ONCE = "{python} -m pytest -p benchmarks.card.once --once {out}/passed --once-seconds {seconds} -n {cores} "
TRAIN = """
if [ -f {out}/checkpoint/progress.json ] && [ ! -f {out}/state/state.pt ]; then
    rm -rf {out}/former; cp -r {out}/checkpoint {out}/former; resume="--resume-from {out}/former"
fi
export OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false TORCHINDUCTOR_COMPILE_THREADS=1
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
{python} -m examples.train_tiny.train --out {out} --state {out}/state --minutes 20.5 --save-minutes 2 $resume"""
PLUGIN = """
{python} -c "from importlib.metadata import entry_points as of; of(group='vllm.general_plugins')['msaserve']" || exit 1
"""
"""Without it vLLM would be compared with itself."""
TURNS = f"""{PLUGIN}
cd {{out}}; rm -rf stock ours
MSASERVE_VLLM=0 {VLLM}/slice.py --memory 0.45 --serve stock > stock.log 2>&1 &
MSASERVE_VLLM=1 {VLLM}/slice.py --memory 0.45 --serve ours > ours.log 2>&1 &
until [ -e stock/ready ] && [ -e ours/ready ]; do sleep 1; [ $(jobs -r | wc -l) = 2 ] || exit 1; done
{VLLM}/turns.py stock ours --out table.json --seconds $(({{seconds}} - SECONDS)); {VLLM}/compare.py table.json"""

SGLANG = """
for cuda in /usr/local/cuda-13* /usr/local/cuda; do
    [ -n "$CUDA_HOME" ] || [ ! -e $cuda/lib64/libcudart.so ] || export CUDA_HOME=$cuda
done
{python} benchmarks/sglang/step.py {sglang}/* --timeout 150"""
"""Without CUDA_HOME, ninja and the two modules no release's CUDA kernel is built, and its Triton kernels select."""


def seen(seconds: float) -> int:
    """What a job took, and a third more."""
    return round(seconds * 4 / 3)


timing = partial(Job, alone=True)
in_vllm = partial(Job, needs=("vllm",), modules=("vllm",))


def recorded(name: str, command: str, seconds: float, **needs: object) -> Job:
    """Of conformance.py: it goes on where its record ends."""
    record = "--record {out}/record.jsonl --known {out}/record.jsonl --seconds {seconds}"
    return Job(name, f"touch {{out}}/record.jsonl; {command} {record}", seconds, **needs)  # type: ignore[arg-type]


def sanitizer(tool: str) -> Job:
    command = f"PYTHON={{python}} benchmarks/ops/sanitize.sh {tool}"
    return recorded(f"sanitizer_{tool}", command, 550, gpu_gib=10, programs=("compute-sanitizer",))


def tokens(name: str, switch: int) -> Job:
    """Of vLLM without and with the plugin, for the judge."""
    command = f"MSASERVE_VLLM={switch} {VLLM}/slice.py --checkpoint {{all}}/vllm_checkpoint --memory 0.4"
    return in_vllm(
        f"vllm_{name}",
        f"{PLUGIN}{command} --out {{out}}/{name}.json",
        seen(264),  # with four of them beside each other
        cores=4,
        gpu_gib=60,
        after=("vllm_checkpoint",),
    )


through_gateway = VLLM + "/through_gateway.py {out}/checkpoint --out {out} --stock --seconds $(({seconds} - 25))"
prefill = OPS + "/prefill.py {with_peers} --seconds {seconds} --out {out}/prefill.json"
throughput = (
    "{python} benchmarks/gateway/throughput.py --processes 1 2 4 8 --workers 6 --load-processes 4 --clients 256"
)
beside_smg = "{python} benchmarks/gateway/beside_smg.py --clip-seconds 10"
judge = VLLM + "/judge.py {all}/vllm_checkpoint {all}/vllm_stock/stock.json {all}/vllm_ours/ours.json"
evaluate = "{python} -m examples.train_tiny.evaluate --checkpoint {all}/train/checkpoint --out {out} --full"
JOBS = (
    timing("decode", OPS + "/decode.py --no-check {with_peers}", seen(33)),
    timing("prefill", prefill, seen(69), partly="skipped$"),
    timing("dense", OPS + "/dense.py --seconds {seconds} --out {out}/dense.json", seen(27), partly="skipped$"),
    timing("context", OPS + "/context_plot.py measure {out}/context.json {with_peers}", 150),
    timing("decode_shared", OPS + "/shared_prefix.py {with_peers}", seen(36)),
    timing(
        "decode_cost", "{python} benchmarks/serve/decode_cost.py --device cuda --graphs", 60, modules=(*MODEL, *TYRO)
    ),
    timing("constraint_masks", "{python} benchmarks/serve/constraint_masks.py", 60, modules=ASKED),
    timing("throughput", throughput, 150, modules=GATEWAY, programs=("smg",)),
    timing("beside_smg", beside_smg, 120, modules=GATEWAY, programs=("smg",)),
    timing("sglang_step", SGLANG, seen(119), needs=("sglang",), modules=("tvm_ffi", "msgspec"), programs=("ninja",)),
    in_vllm("vllm_turns", TURNS, 480, 400, alone=True, files=("*.json", "*.log")),
    recorded(
        "conformance_fp16", OPS + "/conformance.py --jobs {cores} --dtype float16", seen(803), cores=12, gpu_gib=100
    ),
    recorded("conformance", OPS + "/conformance.py --jobs {cores}", 1100, cores=12, gpu_gib=100),
    Job("decode_check", OPS + "/decode.py --check-only", 150, cores=12, gpu_gib=30),
    Job("tests_ops", ONCE + "-m cuda tests/ops", 300, cores=8, gpu_gib=30, modules=TESTS),
    Job("tests_engine", "MSASERVE_TEST_DEVICE=cuda " + ONCE + "tests/engine", 600, cores=4, gpu_gib=20, modules=TESTS),
    *(sanitizer(tool) for tool in ("memcheck", "synccheck", "racecheck", "initcheck")),
    Job("vllm_selection", VLLM + "/selection.py {releases}/*", 240, needs=("releases",)),
    Job("vllm_checkpoint", VLLM + "/checkpoint.py {out}", seen(13), gpu_gib=20, modules=MODEL, files=("*.json",)),
    tokens("stock", 0),
    tokens("ours", 1),
    in_vllm(
        "vllm_gateway",
        PLUGIN + through_gateway,
        300,
        least=200,
        cores=8,
        gpu_gib=60,
        modules=("vllm", "smg_grpc_servicer", "grpc_reflection", "xgrammar", *TEXT_GATEWAY),
        files=("*.log",),
    ),
    Job(
        "judge",
        judge + " --out {out}/judge.jsonl --seconds {seconds}",
        seen(57),  # of three results
        gpu_gib=40,
        modules=MODEL,
        after=("vllm_checkpoint", "vllm_stock", "vllm_ours"),
    ),
    # It goes on when the time is up, so what measures time comes before.
    Job(
        "train",
        TRAIN,
        seen(1241),
        cores=12,
        gpu_gib=60,
        modules=(*MODEL, "tokenizers", "jinja2", "PIL"),
        files=("checkpoint/*", "log.jsonl"),
        partly="^to be resumed",
        detached=True,
    ),
    Job(
        "evaluate",
        evaluate + " --processes {cores} --chunk 8192",
        seen(136),
        cores=12,
        gpu_gib=40,
        modules=(*ASKED, "PIL"),
        after=("train",),
    ),
)
