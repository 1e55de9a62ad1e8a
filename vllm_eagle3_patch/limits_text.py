"""The limits in words: the codes of the contract, each with what it means to an operator."""

MESSAGES = {
    "pipeline-parallel": (
        "with --pipeline-parallel-size above 1 only the last stage's layers can be captured; "
        "ids of earlier layers are refused at start-up"
    ),
    "dual-batch-overlap": (
        "with --enable-dbo the micro-batch wrapper concatenates the model's outputs and fails on "
        "the list of aux hidden states: the patch dual-batch-overlap mends that"
    ),
    "forced-mla-backend": (
        "an MLA attention backend that you set for the target reaches the draft model too, and a "
        "grouped-query one does not start with it: set none; the patch draft-attention-backend "
        "mends that, for the V2 model runner too, which hands it on in every release"
    ),
    "blackwell": (
        "on Blackwell (SM 10.x) vLLM itself sets an MLA attention backend, beside which a "
        "grouped-query draft model does not start: the patch draft-attention-backend mends that, "
        "but set FLASHINFER_MLA where vLLM sets CUTLASS_MLA"
    ),
    "nested-layer-ids": (
        "layer ids under eagle_config in the draft model's config are not read, and the default "
        "layers are used: the patch aux-layer-ids mends that, or put "
        "eagle_aux_hidden_state_layer_ids at the config's top level"
    ),
    "float16": (
        "with --dtype float16 the residual stream is scaled down against overflow, and so are the "
        "captured states; a draft model trained on bfloat16 states accepts badly"
    ),
    "platform": (
        "with --tensor-parallel-size above 1 the model's own file for this platform captures one "
        "rank's part of each state only: the patch aux-layer-bounds (--harden) mends that"
    ),
}
