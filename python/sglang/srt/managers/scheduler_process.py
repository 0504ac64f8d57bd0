"""The scheduler process: builds the executor, then receives, steps and emits until its parent is gone."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import zmq

from sglang.srt.configs.grammar_args import NO_BACKEND
from sglang.srt.configs.metrics_args import parse_labels
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.configs.priority_args import priority_rules
from sglang.srt.constrained.backends import backend_maker
from sglang.srt.constrained.compiling import GrammarCompiler
from sglang.srt.constrained.grammar import JsonOptions
from sglang.srt.managers.executor_errors import is_for_user
from sglang.srt.managers.executor_settings import DEFAULT_RUNNING_REQUESTS, executor_args
from sglang.srt.managers.executor_start import start_executor
from sglang.srt.managers.io_struct import Failed, Ready, TokenBatch, ToScheduler, encode, scheduler_decoder
from sglang.srt.managers.metrics import MetricsSink, NullSink
from sglang.srt.managers.mode_args import auto_controller
from sglang.srt.managers.pulse import Pulse, Watchdog
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_config import SchedulerConfig
from sglang.srt.managers.state_answers import answer_states
from sglang.srt.mem_cache.prefix_cache import NoCache
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.model_executor.executor import Executor
from sglang.srt.model_executor.multi_process_executor import WorkerError
from sglang.srt.model_executor.step_plan import ExecutorInfo
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.toggle import decide_by_threshold
from sglang.srt.utils.child_process import end_with_parent, read_config
from sglang.srt.utils.environment import seconds_from
from sglang.srt.utils.flags import ServerArgsError
from sglang.srt.utils.garbage import leave_start_alone
from sglang.srt.utils.gpu import GPU_DEVICE_FILE
from sglang.srt.utils.ipc import Receiver, Sender, close_sockets, endpoint
from sglang.srt.utils.log import configure_logging, flush_log, say_traceback
from sglang.srt.utils.openmp import spin_briefly
from sglang.srt.utils.routes import RoutedSender
from sglang.srt.utils.run_folder import remove_run_folder
from sglang.srt.utils.text_tokenizer import TextTokenizer, TokenizerError

NAME = "scheduler"

logger = logging.getLogger(__name__)


class SchedulerProcessConfig(msgspec.Struct, frozen=True):
    run_folder: str
    args: ServerArgs  # resolved


def scheduler_config(args: ServerArgs, info: ExecutorInfo) -> SchedulerConfig:
    return SchedulerConfig(
        max_running_requests=min(args.max_running_requests or DEFAULT_RUNNING_REQUESTS, info.num_slots),
        chunked_prefill_size=args.chunked_prefill_size or info.default_chunk,
        max_prefill_tokens=args.max_prefill_tokens,
        max_queued_requests=args.max_queued_requests,
        enable_mixed_chunk=args.enable_mixed_chunk,
        disable_overlap=args.disable_overlap_schedule,
        stream_interval=args.stream_interval,
        decode_log_interval=args.decode_log_interval,
        priorities=priority_rules(args),
        refuse_priorities=args.abort_on_priority_when_disabled,
        runs_processors=args.enable_custom_logit_processor,
        has_workers=args.tokenizer_worker_num > 1,
        waiting_timeout_s=seconds_from("SGLANG_REQ_WAITING_TIMEOUT"),
        running_timeout_s=seconds_from("SGLANG_REQ_RUNNING_TIMEOUT"),
        speculative_disable_bs_threshold=args.speculative_disable_bs_threshold,
        speculative_bs_schedule=args.speculative_bs_schedule,
    )


def build_scheduler(
    args: ServerArgs, executor: Executor, to_detokenizer: Sender, replies: RoutedSender
) -> Scheduler:
    assert args.model_path is not None and args.tokenizer_path is not None
    tokenizer = TextTokenizer.from_folder(args.tokenizer_path)
    model = ModelConfig.from_folder(args.model_path, args.context_length)
    info = executor.info
    eos_ids = tokenizer.stop_ids(model.eos_ids)
    return Scheduler(
        executor=executor,
        config=scheduler_config(args, info),
        policy=decide_by_threshold,
        cache=NoCache() if args.disable_radix_cache else RadixCache(info.page_size),
        decode=tokenizer.decode_shown,
        eos_ids=eos_ids,
        emit=to_detokenizer.send,
        reply=lambda reply: replies.answer(reply.request_id, reply),
        metrics=_metrics(args),
        clock=time.time,
        auto=auto_controller(args, info),
        grammars=_grammars(args, tokenizer, info, eos_ids),
    )


def _grammars(
    args: ServerArgs, tokenizer: TextTokenizer, info: ExecutorInfo, eos_ids: tuple[int, ...]
) -> GrammarCompiler | None:
    if args.grammar_backend == NO_BACKEND:
        return None
    options = JsonOptions(
        args.constrained_json_whitespace_pattern, not args.constrained_json_disable_any_whitespace
    )
    make = backend_maker(args.grammar_backend, tokenizer, info.vocab_size, eos_ids, options)
    compiler = GrammarCompiler(make)
    if args.device == "cuda":  # a start takes long there anyhow, and nobody wants to wait for it later
        compiler.preload()
    return compiler


def _metrics(args: ServerArgs) -> MetricsSink:
    if not args.enable_metrics:
        return NullSink()
    # Only now: prometheus_client reads the environment when it is first imported.
    from sglang.srt.managers.prometheus_sink import PrometheusSink, SinkLabels

    assert args.served_model_name is not None
    extra = parse_labels(args.extra_metric_labels)
    return PrometheusSink(SinkLabels(model_name=args.served_model_name), extra_labels=extra)


def _build_executor(args: ServerArgs, on_failure: Callable[[str], None]) -> Executor:
    if args.device == "cuda" and not GPU_DEVICE_FILE.exists():
        raise ServerArgsError("--device cuda: there is no NVIDIA GPU here; use --device cpu, or leave it out")
    return start_executor(executor_args(args), args.log_level, on_failure)


def ready_info(info: ExecutorInfo) -> dict[str, int]:
    return {
        "context_len": info.context_len,
        "max_total_num_tokens": info.num_pages * info.page_size,
        "vocab_size": info.vocab_size,
    }


def run(scheduler: Scheduler, receiver: Receiver[ToScheduler], pulse: Pulse) -> None:
    while True:
        if not scheduler.has_work:
            receiver.wait(None)
        pulse.begin()
        for message in receiver.receive_all():
            scheduler.receive(message)
        if scheduler.has_work:
            scheduler.step()
        pulse.end()


def serve(config: SchedulerProcessConfig, folder: Path, replies: RoutedSender) -> None:
    executor = _build_executor(config.args, lambda error: _end_with(error, folder))
    receiver = Receiver(endpoint(folder, "scheduler"), scheduler_decoder.decode)
    to_detokenizer = Sender(endpoint(folder, "detokenizer"), encode)
    scheduler = build_scheduler(config.args, executor, to_detokenizer, replies)
    leave_start_alone()
    pulse = Pulse()
    Watchdog(
        pulse,
        config.args.watchdog_timeout or None,
        config.args.soft_watchdog_timeout,
        lambda error: _end_with(error, folder),
    ).start()
    answer_states(
        folder,
        lambda: {**scheduler.state, **pulse.figures()},
        scheduler.live,
        config.args.tokenizer_worker_num,
    )
    to_detokenizer.send(TokenBatch([]))  # opens the way: the detokenizer reports that it has come
    replies.launcher.send(Ready(NAME, dict(ready_info(executor.info))))
    run(scheduler, receiver, pulse)


def _end_with(error: str, folder: Path) -> None:
    """Say so and end the process, from a thread of its own: the main one may be waiting for requests."""
    context: zmq.Context[Any] = zmq.Context()
    Sender(endpoint(folder, "tokenizer"), encode, context).send(Failed(NAME, error))
    context.destroy(linger=1000)
    os._exit(1)


def _is_for_user(error: Exception) -> bool:
    return isinstance(error, ServerArgsError | TokenizerError | WorkerError) or is_for_user(error)


def main() -> int:
    spin_briefly()
    config = msgspec.msgpack.decode(read_config(), type=SchedulerProcessConfig)
    folder = Path(config.run_folder)
    end_with_parent(lambda: remove_run_folder(folder))
    configure_logging(config.args.log_level, NAME)
    replies = RoutedSender(folder, config.args.tokenizer_worker_num, encode)
    try:
        serve(config, folder, replies)
    except Exception as error:
        if not _is_for_user(error):
            say_traceback()
        replies.launcher.send(Failed(NAME, f"{error}" or type(error).__name__))
        replies.close(linger_s=1.0)
        close_sockets()
    # Not sys.exit: a step that is still running in another thread must not keep the process alive.
    flush_log()
    os._exit(1)


if __name__ == "__main__":
    main()
