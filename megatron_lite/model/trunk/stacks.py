"""Names of a model of two stacks: the prefixes of the parameters of each."""

ENCODER, DECODER = "encoder.", "decoder."
