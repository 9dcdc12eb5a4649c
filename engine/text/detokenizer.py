"""Turns the ids of one choice into text as they come, never taking back what it gave."""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from engine.text.tokenizer import Tokenizer


class Detokenizer:
    """Incremental decoding of one choice.

    Ids become bytes and bytes become text: a character is given when its last byte has come, so no
    replacement character is given that a later id would resolve. The texts of `feed` and the
    final `flush` join to `Tokenizer.decode` of all ids. An id costs the same however many came
    before it, and the prompt is never seen.

    `tokenizers.decoders.DecodeStream` 0.23 was compared over random walks through SmolLM2's
    vocabulary: it has no way to end a text, so the one-shot decode's last replacement character is
    missing, and it decodes a window of ids at every step.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        """Starts at empty text."""
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._spaces_to_strip = tokenizer.num_stripped_spaces

    def feed(self, token_id: int) -> str:
        """The text that this id completes, possibly empty."""
        if token_id in self._skipped:
            return ""
        return self._strip(self._decoder.decode(self._tokenizer.id_to_bytes(token_id)))

    def feed_all(self, token_ids: Iterable[int]) -> str:
        """The text that these ids complete, in order."""
        return "".join(map(self.feed, token_ids))

    def flush(self) -> str:
        """Ends the text: an unfinished character becomes a replacement character, once."""
        return self._strip(self._decoder.decode(b"", final=True))

    def _strip(self, text: str) -> str:
        while self._spaces_to_strip and text:
            if not text.startswith(" "):
                self._spaces_to_strip = 0
                break
            text = text[1:]
            self._spaces_to_strip -= 1
        return text
