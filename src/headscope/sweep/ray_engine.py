"""The same chunks as Ray tasks: one model a worker, the same values as on one machine."""

from __future__ import annotations

import copyreg
import io
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from headscope.core.errors import HeadscopeError
from headscope.sweep.job import Job
from headscope.sweep.plan import Chunk


def run_chunks(job: Job, chunks: list[tuple[int, Chunk]], n_workers: int | None = None) -> Iterator[tuple[int, Tensor]]:
    """(number, values) of every chunk as it is done. Uses the cluster that is running (`ray.init` or RAY_ADDRESS), else
    starts one on this machine. A worker that dies is started again and its chunk run again.

    Raises HeadscopeError where Ray is not installed.
    """
    try:
        import ray
    except ImportError:
        raise HeadscopeError("The engine ray needs Ray; install it with: pip install 'headscope[ray]'") from None
    started = not ray.is_initialized()
    if started:
        ray.init(log_to_driver=False, include_dashboard=False, configure_logging=False)
    try:
        cpus = int(ray.cluster_resources().get("CPU", 1))
        n_workers = max(1, min(n_workers or cpus, len(chunks)))
        threads = torch.get_num_threads()
        kind = ray.remote(num_cpus=1, max_restarts=3, max_task_retries=3)(_Worker)
        shared = ray.put(_packed(job))
        workers = [kind.remote(shared, threads) for _ in range(n_workers)]
        waiting = list(reversed(chunks))
        running: dict[Any, tuple[int, Any]] = {}

        def give(worker: Any) -> None:
            number, chunk = waiting.pop()
            running[worker.run.remote(chunk)] = (number, worker)

        for worker in workers:
            give(worker)
        while running:
            (done,), _ = ray.wait(list(running), num_returns=1)
            number, worker = running.pop(done)
            values = torch.from_numpy(ray.get(done).copy())
            if waiting:
                give(worker)
            yield number, values
    finally:
        if started:
            ray.shutdown()


def _packed(job: Job) -> bytes:
    """The job for workers that this process starts itself.

    transformers leaves hooks behind on a model that was once asked for its hidden states; they cannot travel, and only
    matter where somebody asks again. Hooks of the user's own go along.
    """
    from ray import cloudpickle

    class Packer(cloudpickle.CloudPickler):
        def reducer_override(self, thing: Any) -> Any:
            if isinstance(thing, nn.Module):
                state = dict(thing.__dict__)
                for name in ("_forward_hooks", "_forward_pre_hooks"):
                    state[name] = OrderedDict(
                        (key, hook)
                        for key, hook in state[name].items()
                        if not str(getattr(hook, "__module__", "")).startswith("transformers.")
                    )
                return copyreg.__newobj__, (type(thing),), state  # type: ignore[attr-defined]
            return super().reducer_override(thing)

    buffer = io.BytesIO()
    Packer(buffer, protocol=5).dump(job)
    return buffer.getvalue()


class _Worker:
    """Holds the model and its clean pass in a process of its own."""

    def __init__(self, packed: bytes, threads: int) -> None:
        from ray import cloudpickle

        # as many as in the local run: the order in which a sum is taken must not depend on the engine
        torch.set_num_threads(threads)
        self.job: Job = cloudpickle.loads(packed)

    def run(self, chunk: Chunk) -> Any:
        return self.job.run(chunk).numpy()
