"""Export to Hugging Face and import from it. export.py and importing.py are the entry points of both directions.

    export   run -> format (formats.py) -> directory, and what its class computes -> comparison with our model
    import   directory -> format -> configuration and weights, and what its class computes -> run -> comparison

A format is a HuggingFaceFormat (common/model_format.py); it writes and reads the directories of one model:

published systems          published/format.py, for the tables that published/systems.py lists (BERT, GPT-2, T5, ...).
                           A TensorRule per line maps our module to theirs, with Q|K|V as one rule of three names.
                           tensor_map.py applies the rules to tensors, read_config.py and write_config.py to
                           config.json; source.py checks a directory, stack.py writes one.
GLM's own class            glm/own_format.py. modeling_glm.py holds the class. Tensors keep our names after `glm.`.
released GLM checkpoints   glm/released_format.py, and the reference's model-parallel shards; released.py has the names.
models with a spec         OPTIMUS, ELECTRA and ERNIE (Tsinghua): megatron_lite/models/<model>/huggingface.py, found
                           through the model's ModelSpec.

Outputs are compared unless `--no-verify` is given: both models get the same inputs (published/verify.py,
glm/verify.py), and common/verify.py judges the differences.

LoRA: an export merges the updates (common/lora.py); adapters.py writes and imports files of peft.

common/ reads and writes what all formats share: safetensors (weights.py), config.json, recipe, model card, tokenizer.
"""
