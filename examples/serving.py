# %% [markdown]
# # Serving from several threads
#
# Any number of threads may call a fitted posterior; they take turns inside of the network. Here is a service
# that answers with probabilities and with whether to believe them, and what the answer costs beside that
# of the bare network.

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

TINY = "TINY" in os.environ  # for the tests: a few steps, a few requests
torch.manual_seed(0)
x, y = load_digits(return_X_y=True)
x, y = torch.tensor(x / 16, dtype=torch.float32), torch.tensor(y)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
optimiser = torch.optim.Adam(model.parameters(), 1e-2)
for _ in range(10 if TINY else 150):
    optimiser.zero_grad()
    nn.functional.cross_entropy(model(x[:1000]), y[:1000]).backward()
    optimiser.step()
la = LinearisedLaplace(model, "classification", num_samples=4 if TINY else 16)
la.fit(x[:1000], y[:1000], progress_bar=False)
la.calibrate(x[1000:1300], y[1000:1300])
la.save("posterior.pt")  # a server loads it beside the network's own checkpoint

# %% [markdown]
# ## The service
#
# A threshold belongs to the data: here what 95 % of held-out rows stay below. Endpoints that are not
# `async` run in a pool of threads. `num_samples` trades exactness for time.

# %%
posterior = LinearisedLaplace.load("posterior.pt", model)
os.remove("posterior.pt")
familiar = posterior.predict(x[1000:1300]).epistemic.quantile(0.95)
app = FastAPI()


class Rows(BaseModel):
    pixels: list[list[float]]


@app.post("/network")
def of_network(rows: Rows) -> dict[str, list]:
    with torch.no_grad():
        return {"probabilities": model(torch.tensor(rows.pixels)).softmax(-1).tolist()}


@app.post("/posterior")
def of_posterior(rows: Rows) -> dict[str, list]:
    with torch.no_grad():
        prediction = posterior.predict(torch.tensor(rows.pixels), num_samples=4 if TINY else 8)
        return {
            "probabilities": prediction.probs.tolist(),
            "unfamiliar": (prediction.epistemic > familiar).tolist(),
        }


# %% [markdown]
# `uvicorn module:app` would run it. Here the server is a thread, on a port of this machine.

# %%
port = socket.create_server(("127.0.0.1", 0))
server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
thread = threading.Thread(target=server.run, args=([port],), daemon=True)
thread.start()
client = httpx.Client(base_url=f"http://127.0.0.1:{port.getsockname()[1]}", timeout=60)
usual, rotated = x[1300:1304], x[1300:1304].view(-1, 8, 8).rot90(1, (-2, -1)).flatten(1)
for name, rows in {"digits": usual, "digits on their side": rotated}.items():
    answer = client.post("/posterior", json={"pixels": rows.tolist()}).json()
    print(f"{name:22}", answer["unfamiliar"])

# %% [markdown]
# ## Threads
#
# Four threads ask for eight rows each, at once. Clients and JSON share the interpreter with the server
# here, so that the row of the bare network is what all but the posterior costs. The machine was busy.

# %%
request = {"pixels": x[1300:1308].tolist()}


def ask(path):
    began = time.perf_counter()
    assert client.post(path, json=request).status_code == 200
    return time.perf_counter() - began


for path in ("/network", "/posterior"):
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(ask, [path] * (8 if TINY else 80)))
        began, count = time.perf_counter(), 16 if TINY else 400
        seconds = list(pool.map(ask, [path] * count))
        rate = count / (time.perf_counter() - began)
    tail = statistics.quantiles(seconds, n=100)[98]
    print(f"{path:12}{rate:6.0f} requests a second, 99 % within {1000 * tail:.0f} ms")

server.should_exit = True
thread.join()

# %% [markdown]
# ## Without this library
#
# `export` writes `la(x)` as a program of torch alone: a server then needs neither this library nor the
# network's code. The program takes any number of examples. A name that ends with .onnx writes ONNX.

# %%
posterior.export(x[1300:1308], "posterior.pt2")
program = torch.export.load("posterior.pt2").module()
os.remove("posterior.pt2")
rows = x[1300:1350]
print(f"exported and not: apart by {(program(rows) - posterior(rows)).abs().max():.0e} at most")

# %% [markdown]
# How many requests a second that makes, batched and not, beside an ensemble: [serving](../serving.md).
