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
    """The end of the last sentence of text[start:end]; `end` where the text is not cut, `start` without one."""
    if text[end - 1] == eos:
        return end
    while end > start and not sentence_end[text[end - 1]]:
        end -= 1
    return end


@entry_point
def _copy(out, length, text, start, end):
    """Append text[start:end] to out[:length]. Returns the new length."""
    for i in range(start, end):
        out[length] = text[i]
        length += 1
    return length


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
    text, chunk_lengths, counts, input_format, shortest, eos, sep, drops_eos, sentence_end, out, marks, lengths,
    new_counts,
):  # fmt: skip
    """Write the new chunks, their lengths, and their number in each sample. Returns: their tokens, their number."""
    chunk, start, length, count = 0, 0, 0, 0  # length: tokens in `out`; count: chunks in it
    for i in range(len(counts)):
        first = count
        begin = length  # of the current Example, in `out`
        for number in range(counts[i]):
            end = start + chunk_lengths[chunk]
            is_last = number == counts[i] - 1
            if end > start and input_format == _SENTENCES:
                begin = length
                length = _copy(out, length, text, start, end)
                count = _pair_sentences(out, begin, length, shortest, sentence_end, marks, lengths, count)
            elif end > start:
                stop = _last_end(text, start, end, eos, sentence_end)
                if input_format == _FULL and not is_last:
                    stop = end
                elif stop == start and (input_format == _DOCUMENT or length == begin):
                    stop = end  # a sentence without an end is all that there is
                if input_format == _FULL and length > begin and stop > start:
                    out[length] = sep
                    length += 1
                ends_with_dropped = drops_eos and stop - start > 1 and text[stop - 1] == eos
                without_eos = stop - 1 if input_format == _FULL and ends_with_dropped else stop
                length = _copy(out, length, text, start, without_eos)
                if input_format == _DOCUMENT or is_last:
                    lengths[count] = length - begin
                    count += 1
                    begin = length
                if stop < end:
                    length = _copy(out, length, text, stop, end)
                    lengths[count] = end - stop
                    count += 1
                    begin = length
            elif input_format == _FULL and is_last and length > begin:
                lengths[count] = length - begin
                count += 1
            start = end
            chunk += 1
        new_counts[i] = count - first
    return length, count


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
    longest = len(tokens) + len(chunk_lengths)  # a SEP for each chunk
    out, marks = text = np.zeros((2, longest), np.int32)
    lengths, new_counts = np.empty(longest + len(counts), np.int64), np.empty(len(counts), np.int64)
    rule = (FORMATS[name], shortest, *special, drops_eos, sentence_end)
    length, count = _recut(tokens, chunk_lengths, counts, *rule, out, marks, lengths, new_counts)
    return np.ascontiguousarray(text[:, :length]), lengths[:count], new_counts
