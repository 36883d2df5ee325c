"""The words of a command line, parsed for the verb that they name.

Only the parser of that verb is made. Defaults of its options come from the settings file, and words of former releases
and of other programs are translated.
"""

from __future__ import annotations

import argparse
import sys

from neuronpipe.launch.arguments.settings import settle
from neuronpipe.launch.arguments.spellings import FORMER_VERBS, take_former_word, translate
from neuronpipe.launch.arguments.verbs import check_first_word, find_verb, join_words, parsers, read_settings


def parse(words: list[str]) -> argparse.Namespace:
    """Parse a command line; print the current spelling of former and foreign words to stderr. Raises UserError.

    The attribute `words` has the command line in the current spelling.
    """
    lines = [
        f"`{word}` is written `{FORMER_VERBS[word]}` now; the former spelling will go"
        for word in words[:1]
        if word in FORMER_VERBS
    ]
    words = join_words(words)
    verb = find_verb(words)
    parser, by_verb = parsers(verb)
    check_first_word(words, parser)
    if verb is not None:
        settings = read_settings()
        settings.apply(verb, by_verb[verb])
        by_verb[verb].note = settings.note(verb)
        if verb == words[0]:
            words, translations = translate(words, by_verb[verb])
            lines += translations
    arguments, unknown = parser.parse_known_args(words)
    if unknown:
        line = take_former_word(arguments.verb, unknown, arguments, by_verb[arguments.verb])
        if line is None:
            by_verb[arguments.verb].refuse(next((word for word in unknown if word.startswith("-")), unknown[0]))
        lines.append(line)
    for line in lines:
        print(f"neuronpipe: {line}", file=sys.stderr)
    arguments.words = tuple(words)
    return settle(arguments)
