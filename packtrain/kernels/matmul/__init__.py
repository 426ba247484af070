"""Matrix products: f32, bf16, quantized weights, experts, convolutions."""
