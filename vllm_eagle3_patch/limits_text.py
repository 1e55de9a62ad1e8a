"""The limits in words: the codes of the contract, each with what it means to an operator."""

MESSAGES = {
    "pipeline-parallel": (
        "with --pipeline-parallel-size above 1 only the last stage's layers can be captured; "
        "ids of earlier layers are refused at start-up"
    ),
    "dual-batch-overlap": (
        "with --enable-dbo the micro-batch wrapper concatenates the model's outputs and fails on "
        "the pair of hidden states and aux hidden states"
    ),
    "forced-mla-backend": (
        "an attention backend that you set for the target reaches the draft model too: a "
        "grouped-query draft model fails with an MLA backend; set none"
    ),
    "blackwell": (
        "on Blackwell (SM 10.x) vLLM itself sets an MLA attention backend, which a grouped-query "
        "draft model cannot use"
    ),
    "nested-layer-ids": (
        "layer ids under eagle_config in the draft model's config are not read: put "
        "eagle_aux_hidden_state_layer_ids at its top level, or the default layers are used"
    ),
    "float16": (
        "with --dtype float16 the residual stream is scaled down against overflow, and so are the "
        "captured states; a draft model trained on bfloat16 states accepts badly"
    ),
}
