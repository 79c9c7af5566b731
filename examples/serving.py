# %% [markdown]
# # A web service with FastAPI
#
# The service returns probabilities and OOD flags. We compare its throughput with that of the
# network alone, and export the posterior to a program that runs without this library.
# [Deployment](../serving.md) has the measurements.

# %%
import os
import socket
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import torch
import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel
from sklearn.datasets import load_digits
from torch import nn

from torch_lla_em import LinearisedLaplace

torch.manual_seed(0)
x, y = load_digits(return_X_y=True)
x, y = torch.tensor(x / 16, dtype=torch.float32), torch.tensor(y)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
optimiser = torch.optim.Adam(model.parameters(), 1e-2)
for _ in range(150):
    optimiser.zero_grad()
    nn.functional.cross_entropy(model(x[:1000]), y[:1000]).backward()
    optimiser.step()
la = LinearisedLaplace(model, "classification", num_samples=16)
la.fit(x[:1000], y[:1000], progress_bar=False)
la.calibrate(x[1000:1300], y[1000:1300])
la.save("posterior.pt")  # a server loads it together with the network's checkpoint

# %% [markdown]
# ## The service
#
# After `calibrate`, `is_ood` flags out-of-distribution inputs with at most 5 % false alarms.
# FastAPI runs endpoints that are not `async` in a thread pool; a posterior can be called from any
# number of threads. The monitor is given every prediction, and raises an alarm once the distribution of the inputs differs
# from that of the validation set. The probability that it ever raises a false alarm is at most 0.001, however long the
# service runs. A [student](../serving.md#distillation) has the same methods.

# %%
posterior = LinearisedLaplace.load("posterior.pt", model)
os.remove("posterior.pt")
monitor = posterior.monitor(rate=0.001)
app = FastAPI()


class Images(BaseModel):
    pixels: list[list[float]]


@app.post("/network")
def of_network(images: Images) -> dict[str, list]:
    with torch.no_grad():
        return {"probabilities": model(torch.tensor(images.pixels)).softmax(-1).tolist()}


@app.post("/posterior")
def of_posterior(images: Images) -> dict[str, list | bool]:
    with torch.no_grad():
        prediction = posterior.predict(torch.tensor(images.pixels))
        return {
            "probabilities": prediction.probs.tolist(),
            "out_of_distribution": prediction.is_ood(rate=0.05).tolist(),
            "alarm": monitor.update(prediction),
        }


# %% [markdown]
# Usually `uvicorn module:app` runs the service. Here the server is a thread of this process.

# %%
port = socket.create_server(("127.0.0.1", 0))
server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
thread = threading.Thread(target=server.run, args=([port],), daemon=True)
thread.start()
client = httpx.Client(base_url=f"http://127.0.0.1:{port.getsockname()[1]}", timeout=60)
usual, rotated = x[1300:1304], x[1300:1304].view(-1, 8, 8).rot90(1, (-2, -1)).flatten(1)
for name, images in {"digits": usual, "rotated digits": rotated}.items():
    answer = client.post("/posterior", json={"pixels": images.tolist()}).json()
    print(
        f"{name:16}out of distribution: {answer['out_of_distribution']}, alarm: {answer['alarm']}"
    )
print(monitor)
monitor.reset()

# %% [markdown]
# ## Throughput
#
# Four threads send requests of eight images each. Clients, JSON and server share one interpreter
# here, so the line of the network shows the cost of everything except the posterior.

# %%
request = {"pixels": x[1300:1308].tolist()}


def ask(path):
    began = time.perf_counter()
    assert client.post(path, json=request).status_code == 200
    return time.perf_counter() - began


for path in ("/network", "/posterior"):
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(ask, [path] * 80))
        began, count = time.perf_counter(), 400
        seconds = list(pool.map(ask, [path] * count))
        rate = count / (time.perf_counter() - began)
    tail = statistics.quantiles(seconds, n=100)[98]
    print(f"{path:12}{rate:6.0f} requests/s, 99th percentile {1000 * tail:.0f} ms")

server.should_exit = True
thread.join()

# %% [markdown]
# ## Export
#
# `export` writes `la(x)` as a torch program, which returns a dict: the server then needs neither this library nor the
# network's code. The program accepts any batch size. A file name that ends in .onnx selects ONNX.

# %%
posterior.export(x[1300:1308], "posterior.pt2")
program = torch.export.load("posterior.pt2").module()
os.remove("posterior.pt2")
images = x[1300:1350]
difference = program(images)["probs"] - posterior(images)
print(f"largest difference to la(x): {difference.abs().max():.0e}")
