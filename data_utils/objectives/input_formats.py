"""RoBERTa's formats of inputs (arXiv:1907.11692, section 4.2), SEGMENT-PAIR aside: chunks of a window, cut or joined.

    sentences  SENTENCE-PAIR: two sentences of a document an Example, and one alone where their number is odd
    full       FULL-SENTENCES: all documents of a window in one Example, [SEP] between them
    document   DOC-SENTENCES: each document of a window an Example

In the last two an Example ends where a sentence does. A window ends anywhere, so the sentence that it cuts is an
Example of its own: no text is lost. In `sentences` one with few tokens joins a neighbour, such as the "e.g." that only
looks like one; this also bounds the special tokens of a row.
"""

from __future__ import annotations

import numpy as np

from data_utils.objectives.compiled import entry_point

_SENTENCES, _FULL, _DOCUMENT = range(3)
FORMATS = {"sentences": _SENTENCES, "full": _FULL, "document": _DOCUMENT}


@entry_point
def _last_end(text, start, end, eos, sentence_end):
    """The place after the last sentence of text[start:end]; `end` where the text is not cut, `start` without one."""
    if text[end - 1] == eos:
        return end
    while end > start and not sentence_end[text[end - 1]]:
        end -= 1
    return end


@entry_point
def _copy(out, used, text, start, end):
    """Write text[start:end] to out[used:]. Returns the end."""
    for k in range(start, end):
        out[used] = text[k]
        used += 1
    return used


@entry_point
def _pair_sentences(text, start, end, shortest, sentence_end, marks, lengths, count):
    """The lengths of pairs of sentences of text[start:end], and marks at their second ones. Returns their number."""
    begin, sentence, is_second = start, start, False
    for i in range(start, end):
        if sentence_end[text[i]] and i + 1 - sentence >= shortest and end - i - 1 >= shortest:
            sentence = i + 1
            is_second = not is_second
            if is_second:
                marks[sentence] = 1
            else:
                lengths[count] = sentence - begin
                count += 1
                begin = sentence
    lengths[count] = end - begin
    return count + 1


@entry_point
def _recut(
    text,
    chunk_lengths,
    counts,
    kind,
    shortest,
    eos,
    sep,
    drops_eos,
    sentence_end,
    out,
    marks,
    lengths,
    numbers,
):
    chunk, start, used, count = 0, 0, 0, 0
    for i in range(len(counts)):
        first = count
        begin = used  # of the Example, in `out`
        for number in range(counts[i]):
            end = start + chunk_lengths[chunk]
            is_last = number == counts[i] - 1
            if end > start and kind == _SENTENCES:
                used = _copy(out, used, text, start, end)
                first_token = used - (end - start)
                count = _pair_sentences(out, first_token, used, shortest, sentence_end, marks, lengths, count)
            elif end > start:
                stop = _last_end(text, start, end, eos, sentence_end)
                if kind == _FULL and not is_last:
                    stop = end
                elif stop == start and (kind == _DOCUMENT or used == begin):
                    stop = end  # a sentence without an end is all that there is
                if kind == _FULL and used > begin and stop > start:
                    out[used] = sep
                    used += 1
                kept = stop
                if drops_eos and kind == _FULL and stop - start > 1 and text[stop - 1] == eos:
                    kept -= 1
                used = _copy(out, used, text, start, kept)
                if kind == _DOCUMENT or is_last:
                    lengths[count] = used - begin
                    count += 1
                    begin = used
                if stop < end:
                    used = _copy(out, used, text, stop, end)
                    lengths[count] = end - stop
                    count += 1
                    begin = used
            elif kind == _FULL and is_last and used > begin:
                lengths[count] = used - begin
                count += 1
            start = end
            chunk += 1
        numbers[i] = count - first
    return used, count


def recut(
    name: str,
    shortest: int,
    tokens: np.ndarray,
    chunk_lengths: np.ndarray,
    counts: np.ndarray,
    special: tuple[int, int],
    drops_eos: bool,
    sentence_end: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The chunks of samples in a format.

    Args: shortest: tokens of a sentence that stands alone. counts: chunks of each sample. special: the ids of eos and
        SEP. drops_eos: where SEP follows. sentence_end: bool, of each token of the vocabulary.
    Returns: int32 [2, tokens], the text and 1 where the second sentence of a pair begins; lengths and number of chunks.
    """
    most = len(tokens) + len(chunk_lengths)
    text = np.zeros((2, most), np.int32)
    lengths, numbers = np.empty(most + len(counts), np.int64), np.empty(len(counts), np.int64)
    rule = (FORMATS[name], shortest, *special, drops_eos, sentence_end)
    used, count = _recut(tokens, chunk_lengths, counts, *rule, *text, lengths, numbers)
    return np.ascontiguousarray(text[:, :used]), lengths[:count], numbers
