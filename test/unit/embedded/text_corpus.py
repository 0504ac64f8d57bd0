"""At least 5,000 lines of code, prose and non-ASCII text, the same on every run of one environment."""

import random
import sysconfig
from importlib.metadata import distributions
from pathlib import Path

_ALPHABETS = {
    "cjk": "中文字符測試漢字日本語東京都한국어서울",
    "kana": "ひらがなカタカナー々〆",
    "emoji": "😀🎉🚀👩‍💻🏳️‍🌈👍🏽✅❤️🇫🇷",
    "combining": "e\u0301a\u0308o\u0302n\u0303\u0323s\u030c",
    "cyrillic": "Приветмирёъы",
    "greek": "Ελληνικάάέή",
    "arabic": "مرحبابالعالم١٢٣",
    "hebrew": "שלוםעולם",
    "devanagari": "नमस्तेदुनिया१२३",
    "thai": "สวัสดีชาวโลก",
    "numerals": "0123456789²³½¾ⅧⅫ①②９",
    "symbols": "€£¥§¶†‡•…‰™©®°±×÷≤≥≠∞∑√∂",
    "ascii": "abc XYZ_foo(bar)[0]{}<>'\"`~!@#$%^&*-+=|\\/?.,;:",
    "spaces": "  \t\u00a0\u3000\u2003",
}


def code_lines(count: int) -> list[str]:
    """The first ``count`` distinct lines of the standard library's modules, in the order of their names."""
    lines: list[str] = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        lines += path.read_text(encoding="utf-8", errors="replace").splitlines()[:300]
    return _distinct(lines, count)


def prose_lines(count: int) -> list[str]:
    """Distinct lines of the installed packages' descriptions, in the order of the packages' names."""
    lines: list[str] = []
    for found in sorted(distributions(), key=lambda dist: dist.metadata["Name"].lower()):
        lines += str(found.metadata.get_payload() or "").splitlines()[:150]
    return _distinct(lines, count)


def unicode_lines(count: int) -> list[str]:
    """Generated lines that mix scripts, numerals, emoji, combining marks and runs of white space."""
    rng = random.Random(20)
    names = sorted(_ALPHABETS)
    lines = []
    for _ in range(count):
        words = []
        for _ in range(rng.randint(1, 8)):
            alphabet = _ALPHABETS[rng.choice(names)]
            words.append("".join(rng.choice(alphabet) for _ in range(rng.randint(1, 9))))
        lines.append((" " * rng.choice((1, 1, 1, 2, 4))).join(words))
    return lines


def _distinct(lines: list[str], count: int) -> list[str]:
    return [line for line in dict.fromkeys(lines) if line.strip()][:count]
