"""`msaserve serve`: a gateway, and one worker in a process of its own. Importing this loads nothing of either."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import tyro

from msaserve.config import EngineConfig, GenerationDefaults, ModelConfig
from msaserve.errors import InvalidRequestError
from msaserve.gateway.command import Gateway, HttpOptions
from msaserve.gateway.media.options import MediaOptions
from msaserve.interrupt import NotedInterrupt
from msaserve.loop import run_loop

if TYPE_CHECKING:
    from msaserve.integrations.vllm.launch import VllmProcess
    from msaserve.worker.process import WorkerProcess


DEFAULT_CHECKPOINT = Path(__file__).parents[1] / "checkpoints" / "tiny"
"""The small trained model of the repository."""


@dataclass(frozen=True)
class Serve:
    """Serve a checkpoint over HTTP, as OpenAI's API: a gateway in this process, and a worker in another."""

    needs: ClassVar[str] = "all"
    """The extra that brings what it imports."""

    checkpoint: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="CHECKPOINT")] = DEFAULT_CHECKPOINT
    """Directory of config.json, weights, tokenizer.json, chat template. Default: the small trained model of a clone."""
    kind: Annotated[Literal["msaserve", "vllm"], tyro.conf.arg(name="engine")] = "msaserve"
    """What runs the model: this package's engine, or vLLM with its plugin (docs/vllm.md)."""
    vllm_args: str = ""
    """Options of `vllm serve`, in one string: --vllm-args="--tensor-parallel-size 8"."""
    engine: Annotated[EngineConfig, tyro.conf.arg(name="")] = field(default_factory=EngineConfig)
    media: Annotated[MediaOptions, tyro.conf.arg(name="")] = field(default_factory=MediaOptions)
    http: Annotated[HttpOptions, tyro.conf.arg(name="")] = field(default_factory=HttpOptions)

    def run(self) -> int:
        # What fails fast comes first: the address, the configuration, the small files, then the weights.
        if self.checkpoint == DEFAULT_CHECKPOINT and not DEFAULT_CHECKPOINT.is_dir():
            raise InvalidRequestError("give CHECKPOINT: only a clone of the repository has checkpoints/tiny to serve")
        listener = self.http.listen()
        http = self.http.at(listener)
        if self.kind == "msaserve":
            defaults = ModelConfig.from_checkpoint(self.checkpoint).generation
        else:  # vLLM runs checkpoints that this package's engine does not
            defaults = GenerationDefaults.from_checkpoint(self.checkpoint)
        name = self.http.served_model_name or self.checkpoint.resolve().name
        # The worker imports and loads while this process does the same with its part.
        endpoint = self.http.otlp_traces_endpoint
        with NotedInterrupt() as interrupt, self._worker(name) as worker:
            if http.processes > 1:
                return self._supervise(worker, replace(http, served_model_name=name), listener, interrupt)
            from msaserve.gateway.app import create_app
            from msaserve.gateway.chat import ChatTemplate
            from msaserve.gateway.grpc_client import GrpcClient
            from msaserve.gateway.launch import announcement, settings_of
            from msaserve.gateway.server import Listening, run
            from msaserve.observe.trace import make_tracer
            from msaserve.tokenizer import Tokenizer

            interrupt.check()
            # All that blocks stands outside the event loop, which would put a Ctrl-C off.
            tokenizer, template = Tokenizer.load(self.checkpoint), ChatTemplate.load(self.checkpoint)
            settings = settings_of(self.http, name, defaults)
            media = self.media.pipeline(self.checkpoint)
            tracer = make_tracer("gateway", endpoint)
            address = worker.wait_ready(interrupt.check)

            async def serve() -> None:
                interrupt.check()
                files = {"config.json": (self.checkpoint / "config.json").read_bytes()}
                client = GrpcClient(address, files=files, tracer=tracer)
                try:
                    await run(
                        create_app(client, tokenizer, template, settings, media, tracer),
                        Listening(listener),
                        drain_seconds=self.http.drain_seconds,
                        read_seconds=self.http.read_seconds,
                        on_ready=lambda: print(announcement(http.host, http.port, settings, template), flush=True),
                        cut=client.close,
                        failure=worker.death(),
                    )
                finally:
                    await client.close()

            try:
                run_loop(serve())
            finally:
                tracer.close()
        return 0

    def _supervise(
        self,
        worker: WorkerProcess | VllmProcess,
        http: HttpOptions,
        listener: socket.socket,
        interrupt: NotedInterrupt,
    ) -> int:
        """Several gateway processes before the worker, as `msaserve gateway` has them."""
        from msaserve.gateway.processes.supervisor import Supervisor

        options = Gateway(worker=(worker.wait_ready(interrupt.check),), http=http, media=self.media)

        async def serve() -> None:
            interrupt.check()
            await Supervisor(options, http.processes, listener).run(worker.death())

        run_loop(serve())
        return 0

    def _worker(self, name: str) -> WorkerProcess | VllmProcess:
        """The process that runs the model as `name`."""
        if self.kind == "msaserve":
            from msaserve.worker.process import WorkerProcess

            if self.vllm_args:
                raise InvalidRequestError("--vllm-args is for --engine vllm", param="vllm_args")
            endpoint = self.http.otlp_traces_endpoint
            return WorkerProcess(self.checkpoint, self.engine, name, otlp_traces_endpoint=endpoint)
        from msaserve.integrations.vllm import launch

        if self.engine != EngineConfig():
            raise InvalidRequestError("vLLM takes its options from --vllm-args", param="engine")
        options = launch.options_of(self.vllm_args)
        launch.check_installed()
        port = launch.free_port()
        return launch.VllmProcess(launch.command(self.checkpoint, port, options, name=name), port)
