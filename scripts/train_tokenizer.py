"""Train a tokenizer on text and print the configuration lines that use it.

    python scripts/train_tokenizer.py --kind byte_bpe --input 'corpus/*.jsonl' --vocab-size 32000 --output DIR

Writes one file into the output directory: tokenizer.json (byte_bpe), vocab.txt (wordpiece) or tokenizer.model
(sentencepiece). The same input gives the same bytes. Trade-offs: the words of the corpus (byte_bpe,
wordpiece) or its whole text (sentencepiece) must fit in memory, so train on a sample of a large corpus.
wordpiece reads the input twice: without the alphabet in advance the library numbers characters at random.
"""

from __future__ import annotations

import argparse
import glob
import io
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import orjson
import sentencepiece
import tokenizers
import yaml
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers
from tqdm import tqdm

from data_utils.tokenizers import SPECIAL_NAMES, TokenizerConfig, load_tokenizer
from megatron_lite.errors import DataError, UserError, run_command

BLOCK_BYTES = 2**20  # a text file is handed on in blocks of about this size, cut at line ends
MIN_FREQUENCY = 2  # a pair that occurs once is not worth a token
MAX_PIECE_CHARS = 1000  # SentencePiece drops longer lines (4192 bytes) without a word
SENTENCEPIECE_THREADS = 16  # fixed: the sums of the EM steps, hence the model, depend on it
WORDPIECE_SPECIALS = [SPECIAL_NAMES[role] for role in ("pad", "unk", "cls", "sep", "mask")]

Texts = Callable[[], Iterator[str]]  # starts a fresh pass over the corpus


def main(arguments: Sequence[str] | None = None) -> None:
    args = _parse_arguments(arguments)
    file_name, train = TRAINERS[args.kind]
    path = Path(args.output) / file_name
    if path.exists():
        raise DataError(f"{path} exists; remove it or choose another --output.")
    paths = find_inputs(args.input)
    content = train(lambda: read_texts(paths, args.text_key), args.vocab_size, args.cased)
    write_atomically(path, content)

    config = TokenizerConfig(kind=CONFIG_KINDS[args.kind], path=str(path), lowercase=not args.cased)
    tokenizer = load_tokenizer(config)
    lines: dict[str, object] = {"kind": config.kind, "path": config.path}
    if args.kind == "wordpiece":
        lines["lowercase"] = config.lowercase
    print(yaml.safe_dump({"tokenizer": lines}, sort_keys=False, allow_unicode=True), end="")
    print(f"# {tokenizer.vocab_size} tokens with GLM's special tokens, fingerprint {tokenizer.fingerprint}")


def _parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--kind", required=True, choices=list(TRAINERS))
    parser.add_argument(
        "--input", required=True, nargs="+", help="files or globs: .jsonl, anything else is text"
    )
    parser.add_argument(
        "--text-key", default="text", help="key of the text in a .jsonl record (default: text)"
    )
    size_help = (
        "tokens in the file, at most; byte_bpe counts GLM's special tokens, the others add them on loading"
    )
    parser.add_argument("--vocab-size", required=True, type=int, help=size_help)
    parser.add_argument("--cased", action="store_true", help="wordpiece: keep case and accents")
    parser.add_argument("--output", required=True, help="directory for the tokenizer file")
    args = parser.parse_args(arguments)
    if args.cased and args.kind != "wordpiece":
        parser.error(f"--cased is for --kind wordpiece; {args.kind} keeps case anyway")
    return args


# ---- reading ----


def find_inputs(patterns: Iterable[str]) -> list[Path]:
    """Sorted files matching the patterns. Raises DataError for a pattern without a file."""
    paths: set[Path] = set()
    for pattern in patterns:
        matches = [Path(match) for match in glob.glob(pattern, recursive=True) if Path(match).is_file()]
        if not matches and Path(pattern).is_file():  # a name with brackets in it
            matches = [Path(pattern)]
        if not matches:
            raise DataError(f"--input {pattern} matches no file; check the path and quote the pattern.")
        paths.update(matches)
    return sorted(paths)


def read_texts(paths: Sequence[Path], text_key: str) -> Iterator[str]:
    """Texts of the files in order, with a progress bar in bytes when attached to a terminal."""
    total = sum(path.stat().st_size for path in paths)
    with tqdm(total=total, unit="B", unit_scale=True, desc="reading", disable=None) as progress:
        for path in paths:
            for number, chunk in enumerate(_read_chunks(path), start=1):
                progress.update(len(chunk))
                if path.suffix != ".jsonl":
                    yield _decode(chunk, path)
                elif chunk.strip():
                    yield _parse_record(chunk, text_key, f"{path}, line {number}")


def _read_chunks(path: Path) -> Iterator[bytes]:
    """Lines of a .jsonl file, blocks of whole lines of any other."""
    try:
        with path.open("rb") as file:
            if path.suffix == ".jsonl":
                yield from file
            else:
                while block := file.read(BLOCK_BYTES):
                    yield block + file.readline()
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}; check --input.") from None


def _decode(chunk: bytes, path: Path) -> str:
    try:
        return chunk.decode("utf-8")
    except UnicodeDecodeError:
        raise DataError(f"{path} is not UTF-8 text; convert it, or name JSON lines .jsonl.") from None


def _parse_record(line: bytes, text_key: str, where: str) -> str:
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise DataError(f"{where}: not valid JSON ({error}); mend or remove the line.") from None
    text = record.get(text_key) if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise DataError(f"{where}: no text under {text_key!r}; set --text-key.")
    return text


# ---- training: each returns the bytes of the tokenizer's file ----


def train_byte_bpe(texts: Texts, vocab_size: int, cased: bool) -> bytes:
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


def train_wordpiece(texts: Texts, vocab_size: int, cased: bool) -> bytes:
    """BERT's WordPiece as a vocab.txt with BERT's five special tokens first."""
    tokenizer = tokenizers.Tokenizer(models.WordPiece(unk_token=SPECIAL_NAMES["unk"]))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=not cased)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    characters, pieces = _wordpiece_alphabet(tokenizer, texts(), vocab_size // 2)
    _require_size(
        vocab_size, len(WORDPIECE_SPECIALS) + len(pieces) + 1, "the special tokens and the characters"
    )
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        min_frequency=MIN_FREQUENCY,
        # Given ids in advance, single characters keep this order; the trainer's own order is random.
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


def train_sentencepiece(texts: Texts, vocab_size: int, cased: bool) -> bytes:
    """A unigram SentencePiece model; characters it does not know are spelled in bytes."""
    failures: list[UserError] = []  # an error inside the library's callback comes back as a RuntimeError

    def sentences() -> Iterator[str]:
        try:
            for text in texts():
                for line in text.splitlines():
                    yield from (line[i : i + MAX_PIECE_CHARS] for i in range(0, len(line), MAX_PIECE_CHARS))
        except UserError as error:
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
        reason = " ".join(str(error).rpartition("] ")[2].split())[:300]  # without the library's source line
        raise DataError(
            f"--vocab-size {vocab_size}: SentencePiece cannot train this size here: {reason}"
        ) from None
    return model.getvalue()


def _require_size(vocab_size: int, needed: int, reason: str) -> None:
    if vocab_size < needed:
        raise DataError(f"--vocab-size {vocab_size} is too small; {reason} take {needed}.")


TRAINERS = {
    "byte_bpe": ("tokenizer.json", train_byte_bpe),
    "wordpiece": ("vocab.txt", train_wordpiece),
    "sentencepiece": ("tokenizer.model", train_sentencepiece),
}
CONFIG_KINDS = {"byte_bpe": "hf_json", "wordpiece": "bert_wordpiece", "sentencepiece": "sentencepiece"}


# ---- writing ----


def write_atomically(path: Path, content: bytes) -> None:
    """The whole file or none: written beside its place, synced, renamed. Raises DataError if that fails."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise DataError(f"{path}: {error.strerror}; choose another --output.") from None


if __name__ == "__main__":
    run_command(main)
