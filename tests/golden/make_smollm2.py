"""Makes smollm2_greedy.json: 64 greedy tokens of transformers (fp32, the same GGUF) on 16 short Spec-Bench prompts.

Run with the `parity` extra:  python tests/golden/make_smollm2.py ../shared/data/prompts/spec_bench/question.jsonl
"""

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

import specjax
from specjax.models.fetch import demo_model_path
from specjax.prompts import load_prompts

NEW, NUM, LONGEST = 64, 16, 220


def main() -> None:
    path = demo_model_path(None)
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    tokenizer = specjax.load("smollm2-135m").tokenizer
    rows, seen = [], {}
    for prompt in load_prompts(sys.argv[1]):
        ids = tokenizer.chat([{"role": "user", "content": prompt.turns[0]}])
        if len(ids) > LONGEST or seen.get(prompt.category, 0) == 2 or len(rows) == NUM:
            continue
        seen[prompt.category] = seen.get(prompt.category, 0) + 1
        with torch.inference_mode():
            tokens = torch.tensor([ids])
            out = model.generate(
                tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=NEW, do_sample=False, eos_token_id=2,
                pad_token_id=2, output_logits=True, return_dict_in_generate=True,
            )  # fmt: skip
        best = [torch.topk(step[0], 2).values for step in out.logits]
        margins = [round(float(top[0] - top[1]), 4) for top in best]
        rows.append({"id": prompt.id, "prompt": ids, "tokens": out.sequences[0, len(ids) :].tolist(), "margins": margins})
    Path(__file__).with_name("smollm2_greedy.json").write_text("[\n" + ",\n".join(json.dumps(r) for r in rows) + "\n]\n")


if __name__ == "__main__":
    main()
