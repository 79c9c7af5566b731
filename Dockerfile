# docker build -t torch_lla_em . && docker run --rm torch_lla_em
FROM python:3.12-slim
WORKDIR /app
# the CPU-only build of torch; without the index this image would hold CUDA's libraries too
RUN pip install --no-cache-dir torch --index-url https://download.pytorch.org/whl/cpu
COPY setup.cfg setup.py README.md LICENSE ./
COPY torch_lla_em torch_lla_em
RUN pip install --no-cache-dir ".[demo]"
COPY examples examples
CMD ["python", "examples/five_minutes.py"]
