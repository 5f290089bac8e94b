"""Texts for property tests of tokenizers: ordinary ones, and ones that look for control tokens."""

from hypothesis import strategies as st

# Bytes for which the default model's vocabulary has no token: they vanish.
MISSING = {0x04, 0x06, 0x13, 0x14, 0x16, 0x1D, 0xF1, 0xF2}

characters = st.characters(codec="utf-8").filter(lambda c: MISSING.isdisjoint(c.encode()))
any_text = st.text(characters, max_size=60)
# Text that tries hard: whole and broken control tokens among ordinary characters.
FRAGMENTS = [
    "<|im_start|>",
    "<|im_end|>",
    "<|im_",
    "start|>",
    "<",
    "|>",
    "<|endoftext|>",
    "user",
    "\n",
]
hostile_text = st.lists(
    st.sampled_from(FRAGMENTS) | st.text(characters, max_size=3), max_size=12
).map("".join)
