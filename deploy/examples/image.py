"""Pictures by OpenAI's client (pip install openai): writes image-0.png and image-1.png."""
import base64
import os

from openai import OpenAI

client = OpenAI(base_url=os.environ.get("DITFLEET_URL", "http://127.0.0.1:8780") + "/v1",
                api_key=os.environ.get("DITFLEET_KEY", "none"))
answer = client.images.generate(model="demo", prompt="a green triangle", n=2, response_format="b64_json",
                                extra_body={"seed": 7})  # fields that OpenAI does not have go into extra_body
for i, image in enumerate(answer.data):
    with open(f"image-{i}.png", "wb") as file:
        file.write(base64.b64decode(image.b64_json))
