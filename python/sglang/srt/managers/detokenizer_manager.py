"""The detokenizer process: ids from the scheduler become text for the tokenizer manager."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from sglang.srt.managers.incremental_decoder import IncrementalDecoder, piece_decoder
from sglang.srt.managers.io_struct import (
    Failed,
    Ready,
    TextBatch,
    TextOutput,
    TokenBatch,
    TokenOutput,
    detokenizer_decoder,
    encode,
)
from sglang.srt.utils.child_process import end_with_parent, read_config
from sglang.srt.utils.garbage import leave_start_alone
from sglang.srt.utils.ipc import Receiver, close_sockets, endpoint
from sglang.srt.utils.log import configure_logging, say_traceback
from sglang.srt.utils.routed_ids import worker_of
from sglang.srt.utils.routes import RoutedSender
from sglang.srt.utils.run_folder import remove_run_folder
from sglang.srt.utils.text_tokenizer import TextTokenizer, TokenizerError

NAME = "detokenizer"


class DetokenizerConfig(msgspec.Struct, frozen=True):
    run_folder: str
    tokenizer_path: str
    log_level: str
    num_workers: int = 1  # processes that answer clients


class DetokenizerManager:
    """Keeps one decoder for each request that is running. No sockets, no clock."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoders: dict[str, IncrementalDecoder] = {}

    @property
    def num_running(self) -> int:
        return len(self._decoders)

    def handle(self, batch: TokenBatch) -> TextBatch:
        return TextBatch([self._text_of(output) for output in batch.outputs])

    def _text_of(self, output: TokenOutput) -> TextOutput:
        decoder = self._decoders.get(output.rid)
        if decoder is None:
            pieces = piece_decoder(self._tokenizer, output.skip_special_tokens)
            decoder = self._decoders[output.rid] = IncrementalDecoder(pieces, output.stop)
        if output.finish is None:
            text = decoder.push(output.new_ids)
        else:
            text = decoder.finish(_shown_ids(output), output.stop_trim)
            del self._decoders[output.rid]
        return TextOutput(output.rid, text, output.new_ids, output.stats, output.finish, output.report)


def _shown_ids(output: TokenOutput) -> list[int]:
    """Without the id that ended the request, which is no part of what it says."""
    finish = output.finish
    stopped = finish is not None and finish.type == "stop" and isinstance(finish.matched, int)
    return output.new_ids[:-1] if stopped and not output.no_stop_trim else output.new_ids


def send_texts(batch: TextBatch, sender: RoutedSender) -> None:
    """One message to each process that has a part in the batch."""
    if not sender.has_workers:
        sender.send(0, batch)
        return
    parts: dict[int, list[TextOutput]] = {}
    for output in batch.outputs:
        parts.setdefault(worker_of(output.rid), []).append(output)
    for worker, outputs in parts.items():
        sender.send(worker, TextBatch(outputs))


def serve(config: DetokenizerConfig, receiver: Receiver[TokenBatch], sender: RoutedSender) -> None:
    manager = DetokenizerManager(TextTokenizer.from_folder(config.tokenizer_path))
    # The scheduler's first message is an empty batch: when it has come, the whole way is open.
    greeted = False
    while True:
        receiver.wait(None)
        for batch in receiver.receive_all():
            if not greeted:
                leave_start_alone()
                sender.launcher.send(Ready(NAME))
                greeted = True
            if batch.outputs:
                send_texts(manager.handle(batch), sender)


def main() -> int:
    config = msgspec.msgpack.decode(read_config(), type=DetokenizerConfig)
    folder = Path(config.run_folder)
    end_with_parent(lambda: remove_run_folder(folder))
    configure_logging(config.log_level, NAME)
    sender = RoutedSender(folder, config.num_workers, encode)
    try:
        receiver = Receiver(endpoint(folder, "detokenizer"), detokenizer_decoder.decode)
        serve(config, receiver, sender)
    except Exception as error:
        if not isinstance(error, TokenizerError):
            say_traceback()
        sender.launcher.send(Failed(NAME, f"{error}" or type(error).__name__))
        sender.close(linger_s=1.0)
        close_sockets()
    return 1


if __name__ == "__main__":
    sys.exit(main())
