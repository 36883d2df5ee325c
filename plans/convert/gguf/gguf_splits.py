"""The rules by which byte-level BPE splits a text before merging, by the names in `tokenizer.ggml.pre` of GGUF files.

Files have only the names. llama.cpp defines them, and the patterns are from its src/llama-vocab.cpp. Unknown names are
refused, since a wrong split silently gives other tokens for a text.
"""

from __future__ import annotations

from typing import NamedTuple


class Split(NamedTuple):
    """A split rule.

    patterns: a text is cut before and after each match, by one pattern after the other
    composed: accents are first joined to their letters (NFC)
    whole_words: a word that is a token is not built by merges
    starts: the begin token is put before a text unless the file says otherwise
    """

    patterns: tuple[str, ...]
    composed: bool = False
    whole_words: bool = False
    starts: bool = False


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_EACH_DIGIT = (r"\p{N}", _GPT2)
_THREE_DIGITS = r"[0-9][0-9][0-9]"
_LINE_END = r"[\r\n]"
_ASIAN = r"[一-龥ࠀ-一가-퟿]+"
# Letters with case as DeepSeek's own tokenizer.json lists them; today's \p{Lu} and \p{Ll} differ.
_DEEPSEEK_LETTERS = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ"
    "-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰"
    "-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)


def _words(digits: str, marks: str = "", line_ends: str = r"[\r\n]*") -> str:
    """Return the pattern of Llama 3 and Qwen.

    digits: pattern of the digits that stay together
    marks: members of the class of letters that are combining marks
    line_ends: pattern of what stays with the punctuation before
    """
    return (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}"
        + marks
        + r"]+|"
        + digits
        + r"| ?[^\s\p{L}"
        + marks
        + r"\p{N}]+"
        + line_ends
        + r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


def _words_by_case(digits: str, contraction: str = "", but: str = "", line_ends: str = r"\r\n/") -> str:
    """Return the pattern of GPT-4o, gpt-oss and Mistral: capitals before small letters.

    digits: pattern of the digits that stay together
    contraction: pattern of what may follow a word
    but: what words do not contain
    line_ends: characters that stay with the punctuation before
    """
    upper, lower = (rf"[{case}\p{{Lm}}\p{{Lo}}\p{{M}}{but}]" for case in (r"\p{Lu}\p{Lt}", r"\p{Ll}"))
    before = r"[^\r\n\p{L}\p{N}]?"
    words = f"{before}{upper}*{lower}+{contraction}|{before}{upper}+{lower}*{contraction}"
    return f"{words}|{digits}" + rf"| ?[^\s\p{{L}}\p{{N}}]+[{line_ends}]*|\s*[\r\n]+|\s+(?!\S)|\s+"


_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
_DEEPSEEK_3 = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)
SPLITS = {
    "default": Split((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", _THREE_DIGITS)),
    "gpt-2": Split((_GPT2,)),
    "exaone4": Split((_GPT2,)),
    "llama-bpe": Split((_words(r"\p{N}{1,3}"),), whole_words=True, starts=True),
    "dbrx": Split((_words(r"\p{N}{1,3}"),)),
    "qwen2": Split((_words(r"\p{N}"),), composed=True),
    "hunyuan": Split((_words(r"\p{N}"),), composed=True),  # as its tokenization_hy.py does
    "stablelm2": Split((_words(r"\p{N}"),), composed=True),
    "bailingmoe": Split((_BAILING,)),
    "bailingmoe2": Split((_BAILING,)),
    "seed-coder": Split((_words(r"\p{N}", line_ends=""),)),
    "qwen35": Split((_words(r"\p{N}", marks=r"\p{M}"),), composed=True),
    "gpt-4o": Split((_words_by_case(r"\p{N}{1,3}", _CONTRACTION),), whole_words=True),
    "tekken": Split((_words_by_case(r"\p{N}"),), whole_words=True, starts=True),
    # Of tokenization_kimi.py, since llama.cpp computes this split without a pattern.
    "kimi-k2": Split(
        (r"\p{Han}+|" + _words_by_case(r"\p{N}{1,3}", _CONTRACTION, r"&&[^\p{Han}]", r"\r\n"),), whole_words=True
    ),
    "command-r": Split(_EACH_DIGIT, composed=True),
    "smollm": Split(_EACH_DIGIT),
    "starcoder": Split(_EACH_DIGIT),
    "refact": Split(_EACH_DIGIT),
    "mpt": Split((_GPT2,), composed=True),
    "olmo": Split((_GPT2,), composed=True),
    "falcon": Split((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, _THREE_DIGITS)),
    "deepseek-llm": Split(
        (
            _LINE_END,
            rf"\s?[{_DEEPSEEK_LETTERS}]+",
            r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
            r"\s+$",
            _ASIAN,
            r"\p{N}+",
        )
    ),
    "deepseek-v3": Split(_DEEPSEEK_3),
    "hunyuan-dense": Split(_DEEPSEEK_3),
    "deepseek-coder": Split((_LINE_END, r"\s?\p{L}+", r"\s?\p{P}+", _ASIAN, r"\p{N}")),
}
