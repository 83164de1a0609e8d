"""The wire between gateway and worker: `vllm.grpc.engine.VllmEngine` of the package smg-grpc-proto."""
