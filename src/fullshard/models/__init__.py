"""WHAT IS TRAINED: built-in transformers and folders in Hugging Face's layout, their tokenizers,
adapters and samples. `choosing_model.architecture_of` is the way in.
"""
