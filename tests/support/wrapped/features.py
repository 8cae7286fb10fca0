"""The arguments that people pass to ``generate``, one small call for each feature; every call runs on a model and on
its wrap.
"""

from __future__ import annotations

import torch
from calls import (
    as_dict,
    batched,
    config,
    drawn,
    ids_dtype,
    iterated,
    masked,
    odd,
    piped,
    positions,
    processor,
    raises,
    repeats,
    seeded,
    set_config,
    shorter,
    single,
    stop,
    stream,
    streamed_batch,
    text_streamer,
    transitions,
    two_threads,
    two_users,
    with_own_config,
    within_a_processor,
)
from desk import NEW, PROMPT, Call
from transformers import DynamicCache, GenerationConfig, TextStreamer, WatermarkingConfig

from lamina.models.cache_name import cache_name

FEATURES: dict[str, dict[str, Call]] = {}
FEATURES["Lengths"] = {
    "max_new_tokens": batched(max_new_tokens=9),
    "max_length": lambda m, d: m.generate(**d.batch, max_length=d.batch["input_ids"].shape[1] + 4),
    "no length (20 tokens)": lambda m, d: m.generate(d.ids, attention_mask=d.mask),
    "max_new_tokens over max_length": batched(max_new_tokens=4, max_length=100),
    "max_length too small": batched(max_new_tokens=None, max_length=3),
    "max_new_tokens=0": batched(max_new_tokens=0),
    "min_new_tokens": lambda m, d: d.one(m, min_new_tokens=5, eos_token_id=d.likely(m)[2]),
    "min_length": lambda m, d: d.one(m, min_length=d.ids.shape[1] + 4, eos_token_id=d.likely(m)[2]),
    "min_new_tokens over max_new_tokens": single(min_new_tokens=9),
    "max_time": single(max_time=1e-6),
    "max_time (not reached)": single(max_time=600.0),
}
FEATURES["Prompts"] = {
    "inputs (positional)": lambda m, d: m.generate(d.ids, max_new_tokens=NEW),
    "inputs (by name)": lambda m, d: m.generate(inputs=d.ids, max_new_tokens=NEW),
    "input_ids": lambda m, d: m.generate(input_ids=d.ids, max_new_tokens=NEW),
    "inputs and input_ids": lambda m, d: m.generate(d.ids, input_ids=d.ids, max_new_tokens=NEW),
    "attention_mask, padded on the left": batched(),
    "attention_mask of bools": lambda m, d: d.one(m, attention_mask=d.mask.bool()),
    "attention_mask of another shape": lambda m, d: d.one(m, attention_mask=torch.ones(1, 2, dtype=torch.long)),
    "attention_mask in four dimensions": lambda m, d: d.one(m, attention_mask=d.mask[None, None]),
    "attention_mask, padded on the right": masked([-1]),
    "attention_mask with holes": masked([3]),
    "no attention_mask, padded": lambda m, d: m.generate(d.batch["input_ids"], max_new_tokens=NEW),
    "no prompt (bos_token_id)": lambda m, d: m.generate(max_new_tokens=NEW),
    "bos_token_id": lambda m, d: m.generate(max_new_tokens=NEW, bos_token_id=7),
    "int32 tokens": ids_dtype,
    "tokens in one dimension": lambda m, d: m.generate(d.ids[0], max_new_tokens=2),
    "inputs_embeds": lambda m, d: m.generate(
        inputs_embeds=(m.model if hasattr(m, "llm") else m).get_input_embeddings()(d.ids), max_new_tokens=NEW
    ),
    "position_ids (0, 1, 2, ...)": positions(0),
    "position_ids (others)": positions(1),
    "token_type_ids": lambda m, d: d.one(m, token_type_ids=torch.zeros_like(d.ids)),
    "an unknown keyword": single(max_new_tokns=4),
    "under inference_mode": lambda m, d: torch.inference_mode()(d.one)(m),
}
FEATURES["Where settings come from"] = {
    "generation_config": lambda m, d: m.generate(**d.batch, generation_config=config(m)),
    "generation_config and keywords": lambda m, d: m.generate(**d.batch, generation_config=config(m), max_new_tokens=5),
    "the model's own generation_config": with_own_config,
}
FEATURES["Special tokens"] = {
    "eos_token_id": lambda m, d: d.one(m, eos_token_id=d.likely(m)[2]),
    "eos_token_id (a list)": lambda m, d: d.all(m, eos_token_id=[d.likely(m)[2], 9, 11]),
    "eos_token_id=None": batched(eos_token_id=None),
    "eos_token_id=-1": batched(eos_token_id=-1),
    "eos_token_id beyond the vocabulary": batched(eos_token_id=5000),
    "pad_token_id": lambda m, d: d.all(m, eos_token_id=d.likely(m)[2], pad_token_id=5),
    "forced_bos_token_id": lambda m, d: m.generate(d.ids[:, :1], max_new_tokens=NEW, forced_bos_token_id=77),
    "forced_eos_token_id": batched(forced_eos_token_id=1),
    "forced_eos_token_id (a list)": batched(forced_eos_token_id=[1, 5]),
    "decoder_start_token_id": batched(decoder_start_token_id=3),
    "remove_invalid_values": batched(remove_invalid_values=True),
    "renormalize_logits": batched(renormalize_logits=True),
}
FEATURES["Logits"] = {
    "repetition_penalty": single(repetition_penalty=1.5, max_new_tokens=16),
    "repetition_penalty, padded": batched(repetition_penalty=1.5, max_new_tokens=12),
    "repetition_penalty=200": single(repetition_penalty=200.0),
    "repetition_penalty=-1": single(repetition_penalty=-1.0),
    "no_repeat_ngram_size": batched(no_repeat_ngram_size=2, max_new_tokens=12),
    "encoder_repetition_penalty": batched(encoder_repetition_penalty=1.5),
    "encoder_no_repeat_ngram_size": batched(encoder_no_repeat_ngram_size=2),
    "bad_words_ids": lambda m, d: d.all(m, bad_words_ids=[[t] for t in d.likely(m)[:2]] + [[40, 41]]),
    "sequence_bias": lambda m, d: d.all(m, sequence_bias=[[[d.likely(m)[0]], -10.0], [[50, 60], 4.0]]),
    "suppress_tokens": lambda m, d: d.all(m, suppress_tokens=d.likely(m)[:2]),
    "begin_suppress_tokens": lambda m, d: d.all(m, begin_suppress_tokens=d.likely(m)[:1]),
    "exponential_decay_length_penalty": batched(exponential_decay_length_penalty=(2, 1.9), max_new_tokens=12),
    "prefix_allowed_tokens_fn": batched(prefix_allowed_tokens_fn=lambda row, ids: [10 + row, 20 + len(ids) % 7]),
    "guidance_scale": batched(guidance_scale=1.5),
    "guidance_scale, negative_prompt_ids": lambda m, d: d.one(m, guidance_scale=2.0, negative_prompt_ids=d.ids[:, :3]),
    "watermarking_config": batched(watermarking_config=WatermarkingConfig(bias=4.0)),
    "watermarking_config (a dict)": batched(watermarking_config={"bias": 4.0, "greenlist_ratio": 0.3}),
    "logits_processor (a custom one)": processor(),
    "logits_processor (a function)": batched(logits_processor=[odd]),
    "logits_processor, several eos_token_id": lambda m, d: d.all(
        m, logits_processor=[odd], eos_token_id=[7, 9, 11, 13]
    ),
    "logits_processor with others": processor(no_repeat_ngram_size=2, repetition_penalty=1.2),
    "logits_processor=[]": batched(logits_processor=[]),
    "logits_processor that raises": raises,
    "logits_processor that calls generate": within_a_processor,
    "logits_processor of 5": batched(logits_processor=5),
}
FEATURES["Sampling"] = {
    "do_sample": drawn(),
    "temperature": drawn(temperature=0.4),
    "temperature=0": single(do_sample=True, temperature=0.0),
    "temperature=-1": single(do_sample=True, temperature=-1.0),
    "temperature without do_sample": single(temperature=0.4),
    "top_k": drawn(top_k=3),
    "top_k=0": drawn(top_k=0, temperature=0.8),
    "top_k=-1": single(do_sample=True, top_k=-1),
    "top_p": drawn(top_p=0.5),
    "top_p=1.5": drawn(top_p=1.5),
    "top_p=0": single(do_sample=True, top_p=0.0),
    "min_p": drawn(min_p=0.2),
    "min_p=2": single(do_sample=True, min_p=2.0),
    "top_k, top_p and min_p": drawn(top_k=20, top_p=0.8, min_p=0.05),
    "typical_p": seeded(typical_p=0.6),
    "epsilon_cutoff": seeded(epsilon_cutoff=3e-2),
    "eta_cutoff": seeded(eta_cutoff=2e-2),
    "top_h": seeded(top_h=0.4),
    "num_return_sequences": lambda m, d: [d.all(m, do_sample=True, num_return_sequences=3).shape, "rows"],
    "num_return_sequences, seeded": seeded(num_return_sequences=2, temperature=1.2),
    "num_return_sequences, greedy": batched(num_return_sequences=2),
    "torch.manual_seed": repeats,
    "do_sample and logits_processor": processor(do_sample=True, temperature=1.3, top_p=0.9),
    "do_sample and stopping_criteria": stop(do_sample=True),
    "do_sample and bad_words_ids": batched(do_sample=True, bad_words_ids=[[40], [41]]),
    "do_sample and no_repeat_ngram_size": batched(do_sample=True, no_repeat_ngram_size=2, num_return_sequences=2),
}
FEATURES["Stopping"] = {
    "stopping_criteria": stop(),
    "stopping_criteria=[]": batched(stopping_criteria=[]),
    "stopping_criteria (MaxLengthCriteria)": lambda m, d: d.one(m, stopping_criteria=shorter(d)),
    "stop_strings": lambda m, d: d.one(m, stop_strings="=", tokenizer=d.tokenizer, max_new_tokens=16),
    "stop_strings (a list)": lambda m, d: d.all(m, stop_strings=["=", "ss"], tokenizer=d.tokenizer, max_new_tokens=12),
    "stop_strings without tokenizer": single(stop_strings="="),
    "stop_strings of generation_config": lambda m, d: m.generate(
        d.ids, generation_config=GenerationConfig(stop_strings=["="], max_new_tokens=16), tokenizer=d.tokenizer
    ),
    "tokenizer": lambda m, d: d.all(m, tokenizer=d.tokenizer),
    "token_healing": lambda m, d: d.one(m, token_healing=True, tokenizer=d.tokenizer),
}
FEATURES["What comes back"] = {
    "return_dict_in_generate": as_dict("sequences", "scores", "logits"),
    "output_scores": as_dict("sequences", "scores", output_scores=True),
    "output_logits": as_dict("sequences", "logits", output_logits=True),
    "output_scores, output_logits and processors": as_dict(
        "sequences", "scores", "logits", output_scores=True, output_logits=True, repetition_penalty=1.3, eos_token_id=9
    ),
    "output_scores, sampled": as_dict("sequences", "scores", output_scores=True, do_sample=True, top_k=5),
    "output_scores without a dict": batched(output_scores=True),
    "compute_transition_scores": transitions,
    "past_key_values of the dict": lambda m, d: type(d.one(m, return_dict_in_generate=True).past_key_values).__name__,
    "output_attentions": as_dict("sequences", "attentions", output_attentions=True),
    "output_hidden_states": as_dict("sequences", "hidden_states", output_hidden_states=True),
    "attentions, not requested": as_dict("attentions", "hidden_states"),
    "keys of the dict": lambda m, d: sorted(
        k for k in d.one(m, return_dict_in_generate=True, output_logits=True) if k != cache_name()
    ),
}
FEATURES["Streams"] = {
    "streamer": stream(),
    "streamer, sampled": stream(do_sample=True, top_k=1),
    "streamer and processors": stream(no_repeat_ngram_size=2),
    "streamer of a batch": streamed_batch,
    "TextStreamer": text_streamer,
    "TextIteratorStreamer": iterated,
    "TextStreamer of a batch": lambda m, d: d.all(m, streamer=TextStreamer(d.tokenizer)),
}
FEATURES["Caches"] = {
    "use_cache=False": batched(use_cache=False),
    'cache_implementation="dynamic"': batched(cache_implementation="dynamic"),
    'cache_implementation="static"': batched(cache_implementation="static"),
    'cache_implementation="offloaded"': batched(cache_implementation="offloaded"),
    'cache_implementation="quantized"': batched(cache_implementation="quantized"),
    "past_key_values": lambda m, d: d.one(m, past_key_values=DynamicCache()),
    "prefill_chunk_size": batched(prefill_chunk_size=3),
    "max_cache_len": batched(cache_implementation="static", max_cache_len=64),
    "logits_to_keep": batched(logits_to_keep=1),
}
FEATURES["Search"] = {
    "num_beams=1": batched(num_beams=1),
    "num_beams": batched(num_beams=2),
    "num_beams and do_sample": batched(num_beams=2, do_sample=True),
    "num_beam_groups": batched(num_beams=2, num_beam_groups=2, diversity_penalty=0.5),
    "penalty_alpha": batched(penalty_alpha=0.6, top_k=4),
    "dola_layers": batched(dola_layers="low"),
    "force_words_ids": batched(num_beams=2, force_words_ids=[[5]]),
    "constraints": batched(num_beams=2, constraints=[object()]),
    "length_penalty": batched(length_penalty=1.0),
    "early_stopping": batched(early_stopping=False),
    "assistant_model": lambda m, d: d.one(m, assistant_model=m.model if hasattr(m, "llm") else m),
    "prompt_lookup_num_tokens": single(prompt_lookup_num_tokens=3),
    "custom_generate (a function)": batched(custom_generate=lambda model, input_ids, **_: input_ids),
    "custom_generate (a repository)": batched(custom_generate="nobody/nothing"),
    "synced_gpus=False": batched(synced_gpus=False),
    "synced_gpus=True": batched(synced_gpus=True),
    "trust_remote_code": batched(trust_remote_code=False),
    "disable_compile": batched(disable_compile=True),
    "is_assistant=False": batched(is_assistant=False),
    "num_assistant_tokens": batched(num_assistant_tokens=5),
}
FEATURES["The model's own names"] = {
    ".dtype": lambda m, d: m.dtype,
    ".device": lambda m, d: m.device,
    ".config": lambda m, d: (m.config.vocab_size, m.config.model_type),
    ".generation_config": lambda m, d: m.generation_config.to_dict(),
    ".generation_config = ...": set_config,
    ".eval()": lambda m, d: d.one(m.eval()),
    ".training": lambda m, d: m.training,
    ".to(the same device)": lambda m, d: d.one(m.to("cpu")),
    ".to(the same dtype)": lambda m, d: d.one(m.to(torch.float32)),
    ".to(another device)": lambda m, d: m.to("meta") and None if hasattr(m, "llm") else None,
    ".train()": lambda m, d: m.train() and None if hasattr(m, "llm") else None,
    ".can_generate()": lambda m, d: m.can_generate(),
    ".name_or_path": lambda m, d: m.name_or_path,
    ".main_input_name": lambda m, d: m.main_input_name,
    ".num_parameters()": lambda m, d: m.num_parameters(),
    ".get_input_embeddings()": lambda m, d: m.get_input_embeddings().weight.shape,
    ".state_dict()": lambda m, d: sorted(m.state_dict()),
    "call it (logits)": lambda m, d: m(d.ids).logits,
}
FEATURES["pipeline(model=split)"] = {
    "a text": piped(),
    "texts": piped([PROMPT, "import os"]),
    "batch_size=2": piped([PROMPT, "import os\nimport sys"], batch_size=2),
    "return_full_text=False": piped(return_full_text=False),
    "stop_strings": lambda m, d: piped(stop_strings=["="], tokenizer=d.tokenizer)(m, d),
    "a conversation": piped([{"role": "user", "content": "What does json.load do?"}]),
    "output_scores": lambda m, d: [
        x["generated_text"] for x in piped(output_scores=True, return_dict_in_generate=True)(m, d)
    ],
}
FEATURES["Threads"] = {
    "two threads": two_threads,
    "two threads with streamers": two_users,
}
