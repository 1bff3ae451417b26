"""Train a tokenizer on text and print the configuration lines that use it.

    python scripts/train_tokenizer.py --kind hf_json --input 'raw/*.jsonl' --vocab-size 32000 --output DIR

Writes one file into the output directory: tokenizer.json (hf_json), vocab.txt (bert_wordpiece) or tokenizer.model
(sentencepiece). The same input gives the same bytes. The words of the corpus (hf_json, bert_wordpiece) or its
whole text (sentencepiece) must fit in memory, so train on a sample of a large corpus. bert_wordpiece reads the
input twice: unless the library knows the alphabet in advance, it numbers characters at random.
"""

from __future__ import annotations

if __name__ == "__main__":
    import entry  # noqa: F401

import argparse
import io
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import sentencepiece
import tokenizers
import yaml
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from data_utils.common.errors import (
    ArgumentParser,
    ConfigError,
    DataError,
    UserError,
    expanded_path,
    run_command,
)
from data_utils.common.files import require_writable, write_whole
from data_utils.common.progress import progress_bar
from data_utils.corpus.documents import (
    FileRange,
    RecordCounts,
    add_reading_options,
    check_options,
    check_text_key,
    parse_block,
    read_blocks,
)
from data_utils.corpus.inputs import expand_inputs
from data_utils.corpus.stored_files import stored_bytes
from data_utils.tokenizers.special_tokens import SPECIAL_NAMES
from data_utils.tokenizers.tokenizer import TokenizerConfig, load_tokenizer

MAX_VOCAB_SIZE = 1 << 22  # far beyond any tokenizer; the libraries fail at larger numbers
MIN_FREQUENCY = 2  # a pair that occurs once is not worth a token
MAX_LINE_CHARS = 1000  # SentencePiece silently drops lines of more than 4192 bytes
SENTENCEPIECE_THREADS = 16  # fixed: the sums of the EM steps, hence the model, depend on it
WORDPIECE_SPECIALS = [SPECIAL_NAMES[role] for role in ("pad", "unk", "cls", "sep", "mask")]

Texts = Callable[[], Iterator[str]]  # starts a fresh pass over the corpus


def main(arguments: Sequence[str] | None = None) -> None:
    args = _parse_arguments(arguments)
    file_name, train = TRAINERS[args.kind]
    path = Path(args.output) / file_name
    if Path(args.output).suffix in (".json", ".txt", ".model"):
        raise ConfigError(
            f"--output {args.output} must be a directory, in which {file_name} is written; give a name without a "
            "suffix."
        )
    if path.exists():
        raise DataError(f"{path} exists; remove it or choose another --output.")
    require_writable(path, "--output")
    args.paths = expand_inputs(args.input)  # once, though trainers read the texts several times
    check_text_key(args.text_key, args.paths)
    try:
        content = train(lambda: read_texts(args), args.vocab_size, args.lowercase)
    except MemoryError:
        raise DataError(
            f"--input {' '.join(args.input)} does not fit in memory; give a sample of it."
        ) from None
    write_whole(path, content, "--output")

    config = TokenizerConfig(kind=args.kind, path=str(path), lowercase=args.lowercase)
    tokenizer = load_tokenizer(config)
    lines: dict[str, object] = {"kind": config.kind, "path": config.path}
    if args.kind == "bert_wordpiece":
        lines["lowercase"] = config.lowercase
    print(yaml.safe_dump({"tokenizer": lines}, sort_keys=False, allow_unicode=True), end="")
    if args.kind != "sentencepiece" and (found := _tokens_of(path)) < args.vocab_size:
        print(
            f"warning: the vocabulary has {found:,} tokens instead of --vocab-size {args.vocab_size:,}, because no "
            f"further pair occurs {MIN_FREQUENCY} times; give more text, or keep the smaller vocabulary.",
            file=sys.stderr,
        )
    print(f"# {tokenizer.vocab_size} tokens with GLM's special tokens, fingerprint {tokenizer.fingerprint}")


def _tokens_of(path: Path) -> int:
    """The tokens of a file that was written here."""
    if path.suffix == ".txt":
        return path.read_bytes().count(b"\n")
    return tokenizers.Tokenizer.from_file(str(path)).get_vocab_size(with_added_tokens=True)


def _parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = ArgumentParser(description=__doc__)
    add = parser.add_argument
    text = "tokenizer.kind of the file: hf_json (byte-level BPE), bert_wordpiece or sentencepiece"
    add("--kind", required=True, choices=list(TRAINERS), help=text)
    text = "files or globs, as scripts/preprocess_data.py takes them"
    add("--input", type=expanded_path, required=True, nargs="+", help=text)
    add_reading_options(parser)
    text = (
        "largest number of tokens in the file; hf_json includes GLM's special tokens, the others add them on "
        "loading"
    )
    add("--vocab-size", required=True, type=int, help=text)
    text = "bert_wordpiece: keep case and accents"
    add("--no-lowercase", dest="lowercase", action="store_false", help=text)
    add("--output", type=Path, required=True, help="output directory of the tokenizer file")
    args = parser.parse_args(arguments)
    if not args.lowercase and args.kind != "bert_wordpiece":
        raise ConfigError(
            f"--no-lowercase applies to --kind bert_wordpiece only; {args.kind} always keeps case, remove it."
        )
    if not 0 < args.vocab_size <= MAX_VOCAB_SIZE:
        raise ConfigError(f"--vocab-size is {args.vocab_size}; it must be in 1 to {MAX_VOCAB_SIZE}.")
    check_options(args.text_split, args.on_bad_record, args.max_bad_records)
    return args


# ---- reading ----


def read_texts(args: argparse.Namespace) -> Iterator[str]:
    """Texts of the input in order, with a progress bar in bytes when attached to a terminal.

    Raises: DataError for what cannot be read, for bad records as `--on-bad-record` says, and if there is no text.
    """
    counts = RecordCounts()
    is_empty = True
    total = sum(map(stored_bytes, args.paths))
    with progress_bar(total=total, unit="B", unit_scale=True, desc="reading") as progress:
        for block in read_blocks(map(FileRange, args.paths), args.text_key, args.text_split):
            parsed = parse_block(block, args.text_key)
            counts.merge(parsed.counts)
            counts.enforce(args.on_bad_record, args.max_bad_records, args.text_split)
            is_empty = is_empty and not parsed.texts
            yield from parsed.texts
            progress.update(block.input_bytes)
    if is_empty:
        raise DataError(f"--input {' '.join(args.input)} has no text; give files with documents.")


# ---- training: each returns the bytes of the tokenizer's file ----


def train_byte_bpe(texts: Texts, vocab_size: int, lowercase: bool) -> bytes:
    """GPT-2's byte-level BPE as a tokenizer.json. GLM's special tokens have the first ids."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    specials = list(SPECIAL_NAMES.values())
    _require_size(vocab_size, len(alphabet) + len(specials), "256 bytes and the special tokens")
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=MIN_FREQUENCY,
        special_tokens=specials,
        initial_alphabet=alphabet,
        show_progress=sys.stderr.isatty(),
    )
    tokenizer.train_from_iterator(texts(), trainer)
    return tokenizer.to_str(pretty=True).encode()


def train_wordpiece(texts: Texts, vocab_size: int, lowercase: bool) -> bytes:
    """BERT's WordPiece as a vocab.txt with BERT's five special tokens first."""
    tokenizer = tokenizers.Tokenizer(models.WordPiece(unk_token=SPECIAL_NAMES["unk"]))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    characters, pieces = _wordpiece_alphabet(tokenizer, texts(), vocab_size // 2)
    _require_size(
        vocab_size, len(WORDPIECE_SPECIALS) + len(pieces) + 1, "the special tokens and the characters"
    )
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        min_frequency=MIN_FREQUENCY,
        # Characters among the special tokens keep this order; the trainer's own order is random.
        special_tokens=[*WORDPIECE_SPECIALS, *pieces],
        initial_alphabet=characters,
        limit_alphabet=len(characters),
        show_progress=sys.stderr.isatty(),
    )
    tokenizer.train_from_iterator(texts(), trainer)
    vocab = tokenizer.get_vocab()
    return "".join(token + "\n" for token in sorted(vocab, key=vocab.__getitem__)).encode()


def _wordpiece_alphabet(
    tokenizer: tokenizers.Tokenizer, texts: Iterable[str], max_pieces: int
) -> tuple[list[str], list[str]]:
    """The most frequent characters, and their pieces (x; ##x if x continues a word), at most `max_pieces`."""
    counts: Counter[str] = Counter()
    continuing: set[str] = set()
    for text in texts:
        normalized = tokenizer.normalizer.normalize_str(text)
        words = Counter(word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(normalized))
        for word, count in words.items():
            continuing.update(word[1:])
            for character in word:
                counts[character] += count
    characters: list[str] = []
    num_pieces = 0
    for character in sorted(counts, key=lambda c: (-counts[c], c)):
        num_pieces += 1 + (character in continuing)
        if num_pieces > max_pieces:
            break
        characters.append(character)
    characters.sort()
    return characters, characters + [f"##{c}" for c in characters if c in continuing]


def train_sentencepiece(texts: Texts, vocab_size: int, lowercase: bool) -> bytes:
    """A unigram SentencePiece model; characters it does not know are spelled in bytes."""
    # The library turns an error of its callback into a RuntimeError.
    failures: list[UserError | MemoryError] = []

    def sentences() -> Iterator[str]:
        try:
            for text in texts():
                for line in text.splitlines():
                    yield from (line[i : i + MAX_LINE_CHARS] for i in range(0, len(line), MAX_LINE_CHARS))
        except (UserError, MemoryError) as error:
            failures.append(error)
            raise

    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=sentences(),
            model_writer=model,
            vocab_size=vocab_size,
            model_type="unigram",
            byte_fallback=True,
            num_threads=SENTENCEPIECE_THREADS,
            minloglevel=0 if sys.stderr.isatty() else 2,
        )
    except RuntimeError as error:
        if failures:
            raise failures[0] from None
        raise _sentencepiece_error(vocab_size, str(error)) from None
    return model.getvalue()


def _sentencepiece_error(vocab_size: int, message: str) -> DataError:
    """Another message than the library's, which advises options that this script does not have."""
    if match := re.search(r"required_chars\. \d+ vs (\d+)", message):
        return DataError(
            f"--vocab-size {vocab_size} is too small; the characters of this text need {match[1]}; raise it, or "
            "train on a text with fewer characters."
        )
    if match := re.search(r"value <= (\d+)", message):
        return DataError(
            f"--vocab-size {vocab_size} is too large for this text; set it to {match[1]} or less, or give more text."
        )
    reason = " ".join(message.rpartition("] ")[2].split())[:300]  # without the library's source line
    return DataError(
        f"--vocab-size {vocab_size}: SentencePiece cannot train on this text ({reason}); try another size."
    )


def _require_size(vocab_size: int, needed: int, reason: str) -> None:
    if vocab_size < needed:
        raise DataError(f"--vocab-size {vocab_size} is too small; {reason} need {needed}.")


TRAINERS = {
    "hf_json": ("tokenizer.json", train_byte_bpe),
    "bert_wordpiece": ("vocab.txt", train_wordpiece),
    "sentencepiece": ("tokenizer.model", train_sentencepiece),
}


def command() -> None:
    run_command(main)


if __name__ == "__main__":
    command()
