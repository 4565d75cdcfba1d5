command -v apptainer > /dev/null && command -v singularity > /dev/null && exit 0
export DEBIAN_FRONTEND=noninteractive
for attempt in 1 2 3 4 5; do
  apt-get update && apt-get install --yes git build-essential gcc wget &&
    wget --output-document=/tmp/apptainer.deb {package} && apt-get install --yes /tmp/apptainer.deb &&
    ln -sf /usr/bin/apptainer /usr/bin/singularity && exit 0
  sleep 10
done
fail {failed}
