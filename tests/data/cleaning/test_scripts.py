"""Evaluation texts and near-duplicates in scripts with marks, or without spaces, against a count by brute force."""

from __future__ import annotations

import json
import math
import random
import unicodedata

import pytest
import regex
from support.data import cleaning
from support.data.byte_tokenizer import ByteTokenizer

from data_utils.build.config import BuildConfig
from data_utils.build.corpus import build_corpus
from data_utils.common.words import words

LEXICONS = {
    "thai": "ประเทศ ภาษา น้ำ ต้นไม้ โรงเรียน หนังสือ เด็ก ผู้ใหญ่ รถไฟ ทะเล ภูเขา "
    "แม่น้ำ บ้าน อาหาร ข้าว ปลา เมือง ถนน ฝน ลม ดวงอาทิตย์ ดวงจันทร์ กลางคืน "
    "ครู นักเรียน กระดาษ ปากกา ตลาด เรือ สะพาน พ่อ แม่ พี่ น้อง เพื่อน "
    "ความรู้ วัฒนธรรม ประวัติศาสตร์",
    "japanese": "日本 東京 大学 学生 本を 読んで いる 新しい 電車 で 海へ 行く 山の 上に "
    "小さな 家が あります コンピューター テレビ 昨日 食べた 魚は とても おいしかった "
    "友達 と 話し ながら 歩いて 駅まで 雨が 降り 始めた 先生 の 言葉 を 思い出す "
    "カメラ",
    "hindi": "भारत देश दुनिया किताब विद्यालय लड़का लड़की पानी पेड़ सूर्य चन्द्रमा नदी "
    "पहाड़ शहर गाँव रास्ता बारिश हवा भोजन चावल मछली घर माता पिता भाई बहन "
    "मित्र शिक्षक छात्र काग़ज़ क़लम बाज़ार नाव पुल इतिहास संस्कृति ज्ञान भाषा "
    "शब्द वाक्य",
    "arabic": "كِتَابٌ مَدْرَسَةٌ وَلَدٌ بِنْتٌ مَاءٌ شَجَرَةٌ شَمْسٌ قَمَرٌ نَهْرٌ "
    "جَبَلٌ مَدِينَةٌ قَرْيَةٌ طَرِيقٌ مَطَرٌ رِيحٌ طَعَامٌ أُرْزٌ سَمَكٌ "
    "بَيْتٌ أُمٌّ أَبٌ أَخٌ أُخْتٌ صَدِيقٌ مُعَلِّمٌ طَالِبٌ وَرَقٌ قَلَمٌ "
    "سُوقٌ سَفِينَةٌ جِسْرٌ تَارِيخٌ ثَقَافَةٌ عِلْمٌ لُغَةٌ كَلِمَةٌ "
    "جُمْلَةٌ",
    "french": "été élève forêt château hôtel garçon leçon père mère frère œuvre cœur "
    "noël maïs âme île fenêtre tête fête bête rêve pêche crème brûlée où déjà "
    "voilà français hélas théâtre musée lycée idée année soirée journée "
    "vérité santé beauté",
}  # fmt: skip
JOINED = {"thai", "japanese"}


def passage(generator, language, count):
    return generator.choices(LEXICONS[language].split(), k=count)


def written(language, chosen):
    return ("" if language in JOINED else " ").join(chosen)


# The same by other tools: properties of Unicode by the package regex, passages compared one with one.
UNSPACED = r"[\p{Thai}\p{Hiragana}\p{Katakana}\u30fc&&[\p{L}\p{N}]]"
WORD = regex.compile(
    rf"(?V1){UNSPACED}\p{{M}}*|\p{{Han}}\p{{M}}*|(?:[\p{{L}}\p{{N}}--\p{{Han}}--{UNSPACED}]\p{{M}}*)+"
)
LETTER = regex.compile(f"(?V1){UNSPACED}")


def reference_words(text):
    text = regex.sub(r"</?(b|i)>|\p{Default_Ignorable_Code_Point}", "", text)
    return WORD.findall(unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold()))


def share_13_words(first, second):
    """Whether a common passage counts 13 words, of which a letter of Thai or kana is a third."""
    first, second = reference_words(first), reference_words(second)
    longest = [0] * (
        len(second) + 1
    )  # of common passages that end at a word of the first and one of the second
    for word in first:
        value = 1 if LETTER.match(word) else 3
        longest = [0, *(longest[i] + value if word == other else 0 for i, other in enumerate(second))]
        if max(longest) >= 39:
            return True
    return False


def respelled(generator, language, text):
    """Another spelling of a text, as other programs write it."""
    other = {"french": "NFD", "japanese": "NFD", "hindi": "NFC"}.get(language, "NFD")
    return generator.choice(
        [
            unicodedata.normalize(other, text),
            text.upper(),
            "".join(f"{letter}\u00ad" if i % 5 == 2 else letter for i, letter in enumerate(text)),
            text.replace(text[7:9], f"<b>{text[7:9]}</b>", 1),
            "".join(f"{letter}\U000e0041\u200b" if i % 4 == 0 else letter for i, letter in enumerate(text)),
        ]
    )  # fmt: skip


@pytest.mark.parametrize("language", LEXICONS)
def test_words_equal_those_of_properties_of_unicode(language):
    generator = random.Random(3)
    for _ in range(50):
        text = written(language, passage(generator, language, 30)) + " don't_stop, ２０２６年 ﬁn ☃ α̈́Σ"
        text = respelled(generator, language, text)
        assert words(text) == reference_words(text)


@pytest.mark.slow
def test_evaluation_texts_and_near_duplicates_are_found_in_any_script(tmp_path):
    """Of planted ones those that brute force finds, and no other; of near-duplicates as many as the formula says."""
    generator = random.Random(9)
    questions, planted, pairs = {}, [], []
    for language in LEXICONS:
        questions[language] = []
        for _ in range(8):
            question = passage(generator, language, 40)
            questions[language].append(written(language, question))
            for count in (5, 8, 11, 12, 13, 14, 18):
                before, after = passage(generator, language, 30), passage(generator, language, 30)
                text = written(language, [*before, *question[7 : 7 + count], *after])
                planted.append((language, respelled(generator, language, text)))
        for changes in [3, 6, 9, 14, 20] * 10:
            first = passage(generator, language, 120)
            second = list(first)
            for position in generator.sample(range(120), changes):
                (second[position],) = passage(generator, language, 1)
            pairs.append((language, written(language, first), written(language, second)))
    texts = [text for _, text in planted] + [text for _, *pair in pairs for text in pair]
    cleaning.write_lines(tmp_path / "raw.jsonl", texts)
    cleaning.write_lines(tmp_path / "eval.jsonl", [text for texts in questions.values() for text in texts])
    options = ["--input", "raw.jsonl", "--decontaminate", "eval.jsonl"]
    found = set(cleaning.texts(cleaning.cleaned(tmp_path, "out", *options, near_duplicates={})))
    expected = [any(share_13_words(text, one) for one in questions[own]) for own, text in planted]
    assert [text not in found for _, text in planted] == expected
    figures = {}
    for language in LEXICONS:
        of_language = [
            is_found for (own, _), is_found in zip(planted, expected, strict=True) if own == language
        ]
        assert 0 < sum(of_language) < len(of_language)
        chances = [
            1 - (1 - jaccard(first, second) ** 8) ** 14 for own, first, second in pairs if own == language
        ]
        deviation = math.sqrt(sum(chance * (1 - chance) for chance in chances))
        gone = sum((a not in found) + (b not in found) for own, a, b in pairs if own == language)
        assert abs(gone - sum(chances)) <= 4 * deviation + 1, (language, gone, sum(chances))
        figures[language] = (len(of_language), sum(of_language), len(chances), round(sum(chances), 1), gone)
    print("planted, contaminated by brute force and found; pairs, expected, found:", figures)
    assert all(first in found or second in found for _, first, second in pairs)
    # A build counts the same.
    inputs = [str(tmp_path / "raw.jsonl")]
    evaluation = [str(tmp_path / "eval.jsonl")]
    config = BuildConfig(inputs=inputs, output=str(tmp_path / "built/c"), evaluation_inputs=evaluation)
    assert build_corpus(config, ByteTokenizer).contamination["documents"] == sum(expected)
    report = json.loads((tmp_path / "out/report.json").read_text())
    assert report["rules"]["contamination"]["documents"] == sum(expected)


def jaccard(first, second):
    """Of the 5-grams of words, after datatrove's normalization: without marks that take no space."""
    grams = []
    for text in (first, second):
        plain = regex.sub(r"\p{Mn}", "", unicodedata.normalize("NFD", text.lower()))
        found = reference_words(plain)
        grams.append({tuple(found[i : i + 5]) for i in range(len(found) - 4)})
    return len(grams[0] & grams[1]) / len(grams[0] | grams[1])
