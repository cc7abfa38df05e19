"""The architectures that run with transformers' modeling code, and those that are known not to."""

from __future__ import annotations

# Each gives the tokens of transformers in tests/models/test_adopted.py.
ADOPTED = frozenset(
    """
    AfmoeForCausalLM Apertus1p5TextForCausalLM ApertusForCausalLM ArceeForCausalLM
    AriaTextForCausalLM BeamForCausalLM BioGptForCausalLM BitNetForCausalLM CodeGenForCausalLM
    Cohere2ForCausalLM Cohere2MoeForCausalLM CohereForCausalLM CwmForCausalLM Dots1ForCausalLM
    Emu3ForCausalLM Ernie4_5ForCausalLM Ernie4_5_MoeForCausalLM Exaone4ForCausalLM
    ExaoneMoeForCausalLM FlexOlmoForCausalLM FlintForCausalLM GPT2LMHeadModel GPTBigCodeForCausalLM
    GPTJForCausalLM GPTNeoXForCausalLM Gemma2ForCausalLM Gemma3ForCausalLM Gemma4ForCausalLM
    Gemma4UnifiedForCausalLM GemmaForCausalLM Glm4ForCausalLM Glm4MoeForCausalLM GlmForCausalLM
    GptOssForCausalLM GraniteForCausalLM GraniteMoeForCausalLM GraniteMoeSWAForCausalLM
    GraniteMoeSharedForCausalLM GraniteSWAForCausalLM HYV3ForCausalLM HeliumForCausalLM
    HunYuanDenseV1ForCausalLM HunYuanMoEV1ForCausalLM HyperCLOVAXForCausalLM Jais2ForCausalLM
    Kolibri1ForCausalLM LagunaForCausalLM LlamaForCausalLM MellumForCausalLM MiMoV2FlashForCausalLM
    MiniMaxM2ForCausalLM Ministral3ForCausalLM MinistralForCausalLM MistralForCausalLM
    MixtralForCausalLM ModernBertDecoderForCausalLM NanoChatForCausalLM NemotronForCausalLM
    OPTForCausalLM Olmo2ForCausalLM Olmo3ForCausalLM OlmoForCausalLM OlmoeForCausalLM
    PersimmonForCausalLM Phi3ForCausalLM PhiForCausalLM PhimoeForCausalLM Qwen2ForCausalLM
    Qwen2MoeForCausalLM Qwen3ForCausalLM Qwen3MoeForCausalLM SeedOssForCausalLM SmolLM3ForCausalLM
    SolarOpenForCausalLM StableLmForCausalLM Starcoder2ForCausalLM VaultGemmaForCausalLM
    """.split()
)

# What published checkpoints call an architecture, and what transformers calls it.
RENAMED = {"PhiMoEForCausalLM": "PhimoeForCausalLM"}

# Their text part runs; its tokens are those of the whole model in the same test.
TOWERS = frozenset(
    """
    AriaForConditionalGeneration AyaVisionForConditionalGeneration
    Cohere2VisionForConditionalGeneration
    DeepseekVLForConditionalGeneration Emu3ForConditionalGeneration
    Exaone4_5_ForConditionalGeneration Gemma3ForConditionalGeneration Gemma4ForConditionalGeneration
    Gemma4UnifiedForConditionalGeneration Glm46VForConditionalGeneration
    Glm4vForConditionalGeneration Glm4vMoeForConditionalGeneration GotOcr2ForConditionalGeneration
    Idefics3ForConditionalGeneration InternVLForConditionalGeneration
    LightOnOcrForConditionalGeneration LlavaForConditionalGeneration
    LlavaNextForConditionalGeneration LlavaOnevisionForConditionalGeneration
    Mistral3ForConditionalGeneration SmolVLMForConditionalGeneration
    VipLlavaForConditionalGeneration
    """.split()
)

_RECURRENT = "its layers keep a state instead of keys and values"
_OWN_ATTENTION = "its attention has implementations of its own, and takes no other"
_BIASES = "it attends with biases by distance (ALiBi)"
_DIRECTIONS = "its code counts positions in three directions"
_SPARSE = "its attention chooses the tokens that it reads"
REFUSED = {
    "DeepseekV32ForCausalLM": _SPARSE,
    "GlmMoeDsaForCausalLM": _SPARSE,
    **dict.fromkeys(
        """
        BambaForCausalLM FalconH1ForCausalLM FalconMambaForCausalLM GraniteMoeHybridForCausalLM
        JambaForCausalLM KimiLinearForCausalLM MambaForCausalLM Mamba2ForCausalLM
        MiniMaxForCausalLM NemotronHForCausalLM OlmoHybridForCausalLM RecurrentGemmaForCausalLM
        RwkvForCausalLM ZambaForCausalLM Zamba2ForCausalLM xLSTMForCausalLM
        """.split(),
        _RECURRENT,
    ),
    "GlmOcrForConditionalGeneration": _DIRECTIONS,
    "BloomForCausalLM": _BIASES,
    "MptForCausalLM": _BIASES,
    "FalconForCausalLM": _OWN_ATTENTION,
    "GPTNeoForCausalLM": _OWN_ATTENTION,
    "MiniMaxM3ForCausalLM": _SPARSE,
    "MiniMaxM3SparseForConditionalGeneration": _SPARSE,
    "MiniMaxM3VLForCausalLM": _SPARSE,
    "Mistral4ForCausalLM": "it attends over latents, with scores that are scaled by position",
    "LongcatFlashForCausalLM": "its routing reads numbers on the host",
    "DiffLlamaForCausalLM": "its modules attend twice in a layer",
    "DogeForCausalLM": "it attends with a mask of its own",
    "Gemma3nForCausalLM": "its activations read numbers on the host",
    "JetMoeForCausalLM": "its routing reads numbers on the host",
    "Llama4ForCausalLM": "it attends in chunks",
    "Llama4ForConditionalGeneration": "it attends in chunks",
    "Phi4MMForCausalLM": "its weights are stored among those of adapters for images and sound",
    "Phi4MultimodalForCausalLM": "its text part has the towers for images and sound in it",
    "PaliGemmaForConditionalGeneration": "the tokens of a prompt attend to later ones",
}
