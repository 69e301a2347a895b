"""Small tokenizers and random models of families that people fine-tune, with their chat templates.

The templates are written anew to give the same text as those of the models named; those of Mistral
and SmolLM3 are from memory.
"""

from transformers import AutoConfig

TOOLS = (  # without the words around them
    "# Tools\\n\\n<tools>' }}{% for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}"
    "{{ '\\n</tools><|im_end|>\\n")
TOOL_RESULTS = (
    "{% elif m.role == 'tool' %}{{ '<|im_start|>user' if loop.first or loop.previtem.role != 'tool'"
    " }}{{ '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}"
    "{{ '<|im_end|>\\n' if loop.last or loop.nextitem.role != 'tool' }}")
QWEN2 = (  # without its tools and its default system prompt; an empty call as Llama 3.1 does
    "{% for m in messages %}{{ raise_exception('single tool-calls') if m.tool_calls == [] }}"
    "{% if m.role in ('system', 'user', 'assistant') %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{{ '<|im_start|>assistant\n' if add_generation_prompt }}")
QWEN3 = (
    "{% if tools %}{{ '<|im_start|>system\\n' }}{% if messages[0].role == 'system' %}"
    "{{ messages[0].content + '\\n\\n' }}{% endif %}{{ '" + TOOLS + "' }}"
    "{% elif messages[0].role == 'system' %}"
    "{{ '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{% endif %}"
    "{% set ns = namespace(last=messages | length - 1, found=false) %}"
    "{% for m in messages[::-1] %}{% if not ns.found and m.role == 'user' and not "
    "(m.content.startswith('<tool_response>') and m.content.endswith('</tool_response>')) %}"
    "{% set ns.found = true %}{% set ns.last = messages | length - 1 - loop.index0 %}{% endif %}"
    "{% endfor %}"
    "{% for m in messages %}{% set content = m.content if m.content is string else '' %}"
    "{% if m.role == 'user' or m.role == 'system' and not loop.first %}"
    "{{ '<|im_start|>' + m.role + '\\n' + content + '<|im_end|>\\n' }}"
    "{% elif m.role == 'assistant' %}{% set thought = '' %}"
    "{% if m.reasoning_content is string %}{% set thought = m.reasoning_content %}"
    "{% elif '</think>' in content %}"
    "{% set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1]"
    ".lstrip('\\n') %}{% set content = content.split('</think>')[-1].lstrip('\\n') %}{% endif %}"
    "{{ '<|im_start|>assistant\\n' }}"
    "{% if loop.index0 > ns.last and (loop.last or thought) %}"
    "{{ '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}"
    "{% else %}{{ content }}{% endif %}"
    "{% for call in m.tool_calls or [] %}{{ '\\n' if content or not loop.first }}"
    "{% set call = call.function or call %}{{ '<tool_call>\\n{\"name\": \"' + call.name + "
    "'\", \"arguments\": ' + (call.arguments if call.arguments is string else call.arguments | "
    "tojson) + '}\\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\\n' }}" + TOOL_RESULTS +
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    "{% if enable_thinking is defined and enable_thinking is false %}"
    "{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}{% endif %}")
LLAMA3 = (
    "{% for m in messages %}{{ bos_token if loop.first }}{{ '<|start_header_id|>' + m.role + "
    "'<|end_header_id|>\\n\\n' + m.content | trim + '<|eot_id|>' }}{% endfor %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' if add_generation_prompt }}")
GEMMA3 = (
    "{{ bos_token }}{% set system = messages[0].role == 'system' %}"
    "{% for m in (messages[1:] if system else messages) %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Conversation roles "
    "must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' }}"
    "{{ messages[0].content + '\\n\\n' if system and loop.first }}"
    "{{ m.content | trim + '<end_of_turn>\\n' }}{% endfor %}"
    "{{ '<start_of_turn>model\\n' if add_generation_prompt }}")
PHI3 = (
    "{% for m in messages %}{% if m.role in ('system', 'user', 'assistant') %}"
    "{{ '<|' + m.role + '|>\\n' + m.content + '<|end|>\\n' }}{% endif %}{% endfor %}"
    "{{ '<|assistant|>\\n' if add_generation_prompt else eos_token }}")
MISTRAL = (  # Mistral-7B-Instruct-v0.3
    "{% set system = messages[0].content if messages[0].role == 'system' %}"
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}"
    "{{ '[INST] ' + (system + '\\n\\n' if system and loop.last else '') + m.content + '[/INST]' }}"
    "{% elif m.role == 'assistant' %}{{ ' ' + m.content | trim + eos_token }}"
    "{% elif m.role != 'system' %}{{ raise_exception('Only user and assistant roles are supported')"
    " }}{% endif %}{% endfor %}")
SMOLLM3 = (  # without its tools, and with a constant date
    "{% set system = messages[0].content if messages[0].role == 'system' else '' %}"
    "{% set mode = '/no_think' if enable_thinking is defined and not enable_thinking or "
    "'/no_think' in system else '/think' %}"
    "{{ '<|im_start|>system\\n## Metadata\\n\\nKnowledge Cutoff Date: June 2025\\nToday Date: 01 "
    "July 2025\\nReasoning Mode: ' + mode + '\\n\\n## Custom Instructions\\n\\n' }}"
    "{{ (system.replace('/no_think', '').replace('/think', '').rstrip() or 'You are a helpful AI "
    "assistant named SmolLM, trained by Hugging Face.') + '\\n\\n<|im_end|>\\n' }}"
    "{% for m in messages %}{% set content = m.content if m.content is string else '' %}"
    "{% if m.role == 'user' %}{{ '<|im_start|>user\\n' + content + '<|im_end|>\\n' }}"
    "{% elif m.role == 'assistant' %}{% generation %}{{ '<|im_start|>assistant\\n' + "
    "('' if mode == '/think' else '<think>\\n\\n</think>\\n') + content.lstrip('\\n') + "
    "'<|im_end|>\\n' }}{% endgeneration %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' + "
    "('' if mode == '/think' else '<think>\\n\\n</think>\\n') }}{% endif %}")
CHATML = ["<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>",
          "<tool_response>", "</tool_response>", "<|endoftext|>"]
# template, tokens outside the vocabulary, beginning of text, end of text, type of the model
FAMILIES = {
    "qwen2": (QWEN2, CHATML, None, "<|im_end|>", "qwen2"),
    "qwen3": (QWEN3, CHATML, None, "<|im_end|>", "qwen3"),
    "llama3": (LLAMA3, ["<|start_header_id|>", "<|end_header_id|>"], "<|begin_of_text|>",
               "<|eot_id|>", "llama"),
    "mistral": (MISTRAL, ["[INST]", "[/INST]"], "<s>", "</s>", "mistral"),
    "gemma3": (GEMMA3, ["<start_of_turn>", "<end_of_turn>"], "<bos>", "<eos>", "gemma3_text"),
    "phi3": (PHI3, ["<|system|>", "<|user|>", "<|assistant|>", "<|end|>"], None, "<|endoftext|>",
             "phi3"),
    "smollm3": (SMOLLM3, CHATML, None, "<|im_end|>", "smollm3")}

TEXT = "The cat sat on a mat; naïve Ωmega 猫 and then\n it ran off, 123 times!\n\n" * 20


def chat(*turns: str) -> list[dict]:
    """"user: Hello" and so on, as messages."""
    parts = [turn.partition(": ") for turn in turns]
    return [dict(role=role, content=content) for role, _, content in parts]


CALL = dict(type="function", function=dict(name="add", arguments=dict(a=1, b=2)))
CHATS = {
    "one turn": chat("user: Hello", "assistant: Hi there."),
    "two turns": chat("system: Be brief.", "user: Hello", "assistant: Hi.", "user: And?",
                      "assistant: Bye\n\nnow."),
    "a thought": chat("user: 2+2?", "assistant: <think>\nIt is 4.\n</think>\n\nFour."),
    "two thoughts": chat("user: 2+2?", "assistant: <think>\nIt is 4.\n</think>\n\nFour.",
                         "user: 3?", "assistant: <think>\nHm.\n</think>\n\nThree."),
    "white space": chat("user:  Hello \n", "assistant: \n  Hi \n"),
    "no last reply": chat("user: Hello", "assistant: Hi.", "user: And?"),
    "a tool": [*chat("user: 1+2?"), dict(role="assistant", content="", tool_calls=[CALL]),
               dict(role="tool", name="add", content="3"), *chat("assistant: Three.")]}


def make_tokenizer(template: str, special: list[str], begin: str | None, end: str):
    """A byte-level BPE of 320 ids trained on TEXT, with the tokens and the template of a family."""
    from tokenizers import models, pre_tokenizers, trainers

    from steady.tokens.tokenizers import byte_level_bpe

    tokenizer = byte_level_bpe(models.BPE())
    tokenizer.backend_tokenizer.train_from_iterator([TEXT], trainers.BpeTrainer(
        vocab_size=320, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    tokenizer.add_special_tokens(dict(eos_token=end) | (dict(bos_token=begin) if begin else {}))
    tokenizer.add_tokens(special, special_tokens=True)
    tokenizer.chat_template = template
    return tokenizer


def tokenizer_of(family: str):
    return make_tokenizer(*FAMILIES[family][:4])


def config_of(family: str, tokenizer):
    """A model of two layers that takes milliseconds a step."""
    size = dict(vocab_size=len(tokenizer), hidden_size=64, intermediate_size=96,
                num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                max_position_embeddings=256, eos_token_id=tokenizer.eos_token_id,
                bos_token_id=tokenizer.bos_token_id, pad_token_id=None)
    if family in ("qwen3", "gemma3"):
        size |= dict(head_dim=16)
    if family == "gemma3":
        size |= dict(sliding_window=64)
    if family == "mistral":
        size |= dict(sliding_window=None)
    return AutoConfig.for_model(FAMILIES[family][-1], **size)
