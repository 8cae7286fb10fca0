"""Recurrent layers of Hugging Face models: routing, one operator of each layer, states that a model asks for."""
