"""Put a trained drafter into the package: weights, record and card.

    python -m experiments.ship_drafter FILE --run RECORD.json [--corpus CORPUS.npz --draft-vocab N]

FILE is what the trainer wrote; RECORD the run's record (see `experiments.drafter_runs`). With
`--draft-vocab`, only the N tokens that the target wrote most in the corpus are ever drafted.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from pathlib import Path

from safetensors.torch import load_file, save_file

from megadecode.drafter import load_drafter
from megadecode.drafter.find import SHIPPED
from megadecode.drafter.io import single_file_metadata
from megadecode.models.gguf_file import load
from megadecode.models.store import DEFAULT_MODEL, resolve
from megadecode.training.card import card
from megadecode.training.corpus import Corpus
from megadecode.training.vocabulary import frequent_tokens


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--corpus", type=Path)
    parser.add_argument("--draft-vocab", type=int, default=0)
    parser.add_argument("--out", type=Path, default=SHIPPED)
    args = parser.parse_args()
    model = load(resolve(DEFAULT_MODEL))
    record = json.loads(args.run.read_text(encoding="utf-8"))
    config = dataclasses.replace(
        load_drafter(args.file, model).config, name=f"{DEFAULT_MODEL} drafter"
    )
    if args.draft_vocab:
        corpus = Corpus.load(args.corpus)
        written = corpus.tokens[corpus.written]
        tokens, share = frequent_tokens(
            written, config.vocab, args.draft_vocab, model.config.stop_ids
        )
        config = dataclasses.replace(config, draft_tokens=tokens)
        record["drafted_tokens"] = {"count": len(tokens), "share_of_corpus": round(share, 5)}
        print(f"{len(tokens)} tokens, {share:.3%} of what the target wrote")
    args.out.mkdir(parents=True, exist_ok=True)
    file = args.out / f"{DEFAULT_MODEL}.safetensors"
    part = file.with_name(file.name + ".part")
    tensors = {name: t.bfloat16().contiguous() for name, t in load_file(args.file).items()}
    save_file(tensors, part, single_file_metadata(config))
    part.chmod(0o644)
    os.replace(part, file)
    record["drafter"] = json.loads(json.dumps(config.to_dict())) | {
        "draft_tokens": len(config.draft_tokens)
    }
    (args.out / f"{DEFAULT_MODEL}.json").write_text(json.dumps(record, indent=1) + "\n")
    (args.out / f"{DEFAULT_MODEL}.md").write_text(card(record), encoding="utf-8")
    print(f"{file}: {file.stat().st_size} bytes")


if __name__ == "__main__":
    main()
