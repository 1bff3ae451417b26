"""`pipeline("blank-infilling", ...)` for GLM: texts with [MASK], [sMASK] or [gMASK] in, filled texts out.

Blanks are filled in text order; the model reads earlier spans when it fills a later one. Part of an export's code.
"""

# transformers annotates its base classes more narrowly than it lets them be used.
# mypy: ignore-errors

from transformers import Pipeline


class BlankInfillingPipeline(Pipeline):
    """Options of `generate` (max_new_tokens, do_sample, ...) may be given to the pipeline or to a call."""

    _load_processor = False
    _load_image_processor = False
    _load_feature_extractor = False
    _load_tokenizer = True

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.model.config.require_blank_infilling()

    def _sanitize_parameters(self, **generate_options):
        return {}, generate_options, {}

    def preprocess(self, text: str) -> dict:
        return {"encoded": self.tokenizer(text)}

    def _forward(self, model_inputs: dict, **generate_options) -> dict:
        """Returns: ids [text, span, text, span, ..., text], CLS and the final end-of-text token left out."""
        tokenizer, config = self.tokenizer, self.model.generation_config
        text, blanks = model_inputs["encoded"]["input_ids"], tokenizer.blank_token_ids
        ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
        spans: list[list[int]] = []
        segments: list[list[int]] = [[]]
        for token in text[1:-1]:
            if token not in blanks:
                segments[-1].append(token)
                continue
            # Block positions end at max_position: of a span of that length the last token has none.
            context = [span[: self.model.config.max_position - 1] for span in spans]
            inputs = tokenizer.build_inputs_for_generation(model_inputs["encoded"], [context])
            inputs = inputs.to(self.model.device)
            generated = self.model.generate(**inputs, **generate_options)
            new_tokens = generated[0, inputs["input_ids"].shape[1] :].tolist()
            end = next((i for i, new in enumerate(new_tokens) if new in ends), len(new_tokens))
            spans.append(new_tokens[:end])
            segments += [spans[-1], []]
        if not spans:
            raise ValueError("the text has no blank; mark at least one with [MASK], [sMASK] or [gMASK].")
        return {"segments": segments}

    def postprocess(self, model_outputs: dict) -> dict:
        """Returns: the filled text, the spans as text, and the spans' token ids."""
        segments = model_outputs["segments"]
        texts = [self.tokenizer.decode(segment) if segment else "" for segment in segments]
        return {"filled": "".join(texts), "spans": texts[1::2], "span_ids": segments[1::2]}
