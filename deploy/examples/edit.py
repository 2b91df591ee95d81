"""An edit by OpenAI's client: draws over image.png with the prompt and writes edited.png."""
import base64
import os

from openai import OpenAI

client = OpenAI(base_url=os.environ.get("DITFLEET_URL", "http://127.0.0.1:8780") + "/v1",
                api_key=os.environ.get("DITFLEET_KEY", "none"))
with open("image.png", "rb") as file:
    answer = client.images.edit(model="demo", image=file, prompt="a green circle above a blue square",
                                response_format="b64_json", extra_body={"strength": 0.7, "seed": 7})
with open("edited.png", "wb") as file:
    file.write(base64.b64decode(answer.data[0].b64_json))
