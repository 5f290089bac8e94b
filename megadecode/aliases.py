"""Names that other engines use for sampling parameters, and what to say to whoever writes one.

They are not accepted: two names for one thing, of which only one is in the documentation, outlive
the reason for them. But nobody should have to look up what ours is called.
"""

from __future__ import annotations

from collections.abc import Iterable

_USE = {
    "max_new_tokens": (
        "max_tokens", "max_completion_tokens", "max_output_tokens", "max_length", "n_predict",
        "num_predict",
    ),
    "min_new_tokens": ("min_tokens", "min_length"),
    "temperature": ("temp",),
    "top_k": ("topk", "k"),
    "top_p": ("topp", "nucleus", "p"),
    "min_p": ("minp",),
    "seed": ("random_seed", "rng_seed"),
    "stop": ("stop_strings", "stop_sequences", "stop_words", "stops", "antiprompt", "until"),
    "stop_token_ids": ("eos_token_id", "stop_ids", "stop_tokens", "eos_id"),
    "ignore_eos": ("ignore_eos_token", "no_stop"),
    "logprobs": ("top_logprobs", "num_logprobs", "n_probs", "top_logprobs_num"),
    "logit_bias": ("logits_bias", "sequence_bias", "bias"),
}  # fmt: skip

_PENALTY = "penalties depend on the path at every node of a tree and are not in this release"
_SEVERAL = "one request is one sequence: submit the prompt several times, with different seeds"
_GRAMMAR = "constrained decoding is not in this release"
_SAMPLER = "this sampler is not in this release; there are top_k, top_p and min_p"
_WHY = {
    _PENALTY: (
        "repetition_penalty", "presence_penalty", "frequency_penalty", "repeat_penalty",
        "repeat_last_n", "no_repeat_ngram_size", "encoder_repetition_penalty", "dry_multiplier",
        "length_penalty",
    ),
    _SEVERAL: (
        "n", "best_of", "num_beams", "beams", "num_return_sequences", "use_beam_search",
        "diversity_penalty", "early_stopping",
    ),
    _GRAMMAR: (
        "grammar", "guided_decoding", "guided_json", "guided_regex", "structured_outputs",
        "json_schema", "response_format", "regex", "ebnf", "bad_words", "bad_words_ids",
        "logits_processor", "logits_processors",
    ),
    _SAMPLER: (
        "typical_p", "typ_p", "tfs_z", "mirostat", "mirostat_mode", "mirostat_tau", "mirostat_eta",
        "top_a", "eta_cutoff", "epsilon_cutoff", "xtc_probability", "dynatemp_range", "top_n_sigma",
        "penalty_alpha", "top_h",
    ),
    "say temperature=0 for greedy, above 0 to sample": ("do_sample", "greedy"),
    "text always leaves special tokens out; token_ids holds all": (
        "skip_special_tokens", "spaces_between_special_tokens", "detokenize",
    ),
    "text ends before a stop string; token_ids holds all": (
        "include_stop_str_in_output", "no_stop_trim",
    ),
    "prompt tokens get no log-probabilities in this release": (
        "prompt_logprobs", "echo", "return_logprob", "logprob_start_len",
    ),
    "use Engine.stream, or iterate the request": ("stream", "streamer"),
}  # fmt: skip

_HINTS = {name: f"use {ours}" for ours, names in _USE.items() for name in names} | {
    name: why for why, names in _WHY.items() for name in names
}


def unsupported(names: Iterable[str], known: Iterable[str]) -> str:
    """The message for parameters there are not: what to use instead, or else what there is."""
    said = [f"{name!r}: {_HINTS[name]}" if name in _HINTS else repr(name) for name in names]
    message = f"unsupported sampling parameter {'; '.join(said)}"
    if any(name not in _HINTS for name in names):
        message += f"; this release knows {', '.join(known)}"
    return message
