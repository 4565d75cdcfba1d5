# Tell where enroot unpacks images on this host: the folder, the kind of file system, free bytes, whether roots are writable.
# With a pattern of network file systems and the ids of live jobs, first remove ray.sub's containers and those of ended jobs, and
# end what is left in them: the node is this job's alone. On a network file system other hosts' processes would not be seen.
command -v enroot > /dev/null || exit 0
library=$(mktemp -d) && trap 'rm -r "$library"' EXIT
# enroot sources the files of ENROOT_LIBRARY_PATH once its configuration is read.
cat > "$library/common.sh" << 'END'
printf '%s\t%s\t%s\t%s\t%s\n' "$(uname -n)" "$ENROOT_DATA_PATH" "$(stat --file-system --format=%T "$ENROOT_DATA_PATH")" \
  "$(df --block-size=1 --output=avail "$ENROOT_DATA_PATH" | tail -n 1)" "${ENROOT_ROOTFS_WRITABLE-no}"
exit
END
place() { ENROOT_LIBRARY_PATH=$library enroot list; }

users() {
  for root in /proc/[0-9]*/root; do
    [ ! "$root/" -ef "$1" ] || echo "$root" | cut -d / -f 3
  done
}

IFS=$'\t' read -r _ folder kind _ < <(place)
if [ $# -gt 0 ] && ! [[ $kind =~ ^($1) ]]; then
  for name in $(enroot list); do
    case $name in
      pyxis_ray-head | pyxis_ray-worker*) ;;
      pyxis_*[!0-9.]* | pyxis_*.*.*) continue ;;
      pyxis_*.*) case " $* " in *" $(expr "$name" : 'pyxis_\([0-9]*\)') "*) continue ;; esac ;;
      *) continue ;;
    esac
    for signal in 0 0 0 TERM 0 0 KILL; do # a step that has just ended needs a moment
      left=$(users "$folder/$name")
      [ -n "$left" ] || break
      kill -"$signal" $left 2> /dev/null
      sleep 1
    done
    enroot remove --force "$name" < /dev/null || [ ! -e "$folder/$name" ] || exit 1 # pyxis removes nameless ones, too
  done
fi
place
