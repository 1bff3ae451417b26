"""Export to Hugging Face and import from it. export.py and importing.py are the entry points of both directions.

Each picks one of these paths by the model (export) or by the files of the directory (import):

GLM's own class            glm/modeling_glm.py holds the class, glm/export.py and glm/importing.py write and read its
                           directory. Tensors keep our names under the prefix `glm.`.
released GLM checkpoints   the same two files, with glm/released.py, which renames tensors and reads the reference's
                           model-parallel shards.
published systems          published/systems.py and the tables that it lists (BERT, GPT-2, T5, Llama, ...) hold one
                           TensorRule per line: our module -> theirs, with Q|K|V as one rule of three names.
                           tensor_map.py applies the rules to tensors, read_config.py and write_config.py to
                           config.json, source.py checks a directory, runs.py writes the run or the export.
models with a spec         OPTIMUS, ELECTRA and ERNIE (Tsinghua): a HuggingFaceFormat (model_format.py) in
                           megatron_lite/models/<model>/huggingface.py, found through the model's ModelSpec.

LoRA: an export merges the updates (`merged` in files/lora.py); adapters.py writes and imports files of peft.

files/ reads and writes what all paths share: safetensors (weights.py), config.json, recipe, model card, tokenizer.
Unless `--no-verify` is given, both directions end with a proof: our model and the other one get the same inputs, and
their outputs are compared (files/proof.py) on inputs of glm/proof.py or published/proof.py.
"""
