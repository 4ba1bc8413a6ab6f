# --- the bucket ---------------------------------------------------------------------------------

variable "name" {
  description = "Name of the bucket, and start of every other name. With Express, the zone and `--x-s3` are appended."
  type        = string
  nullable    = false

  validation {
    condition     = can(regex("^[a-z0-9][a-z0-9-]{1,61}[a-z0-9]$", var.name))
    error_message = "name must be 3 to 63 lower-case letters, digits and hyphens, without a hyphen at either end (S3 allows dots as well, but TLS certificates do not)."
  }

  validation {
    condition     = !can(regex("^(xn--|sthree-|amzn-s3-demo-)", var.name)) && !can(regex("(-s3alias|--ol-s3|--x-s3|--table-s3)$", var.name))
    error_message = "name must not start or end with what S3 reserves: xn--, sthree-, amzn-s3-demo-, -s3alias, --ol-s3, --x-s3, --table-s3."
  }

  validation {
    condition     = var.storage != "express" || length("${var.name}--${coalesce(var.availability_zone_id, "use1-az4")}--x-s3") <= 63
    error_message = "name is too long for Express: with --ZONE--x-s3 appended it must not be longer than 63."
  }
}

variable "storage" {
  description = "`standard`: a general purpose bucket. `express`: a directory bucket (S3 Express One Zone) in one zone."
  type        = string
  default     = "standard"
  nullable    = false

  validation {
    condition     = contains(["standard", "express"], var.storage)
    error_message = "storage must be \"standard\" or \"express\"."
  }
}

variable "availability_zone_id" {
  description = "Id (not name) of the zone the GPU nodes are in, such as `use1-az4`. Express only."
  type        = string
  default     = null

  validation {
    condition     = (var.storage == "express") == (var.availability_zone_id != null)
    error_message = "availability_zone_id belongs to storage = \"express\": set both or neither."
  }

  validation {
    condition     = var.availability_zone_id == null || can(regex("^[a-z0-9]+-az[0-9]+$", var.availability_zone_id))
    error_message = "availability_zone_id must be a zone's id such as \"use1-az4\", not its name such as \"us-east-1a\"."
  }
}

variable "prefix" {
  description = "What all keys of s3kv start with; its setting of the same name. Objects under a former prefix no longer expire: delete them by hand."
  type        = string
  default     = "s3kv"
  nullable    = false

  validation {
    # No IAM wildcard (* ?) and no IAM variable ($) may get into a policy this way.
    condition     = can(regex("^[A-Za-z0-9][A-Za-z0-9._=-]*(/[A-Za-z0-9][A-Za-z0-9._=-]*)*$", var.prefix))
    error_message = "prefix must be letters, digits and ._=- in parts separated by single slashes, without a slash at either end, such as \"s3kv\" or \"team-a/s3kv\"."
  }
}

variable "expiration_days" {
  description = "Objects under the prefix are deleted this many days after they were last written (S3 knows nothing of reads). Writers rewrite what they use after a quarter of that."
  type        = number
  default     = 7
  nullable    = false

  validation {
    condition     = var.expiration_days >= 1 && floor(var.expiration_days) == var.expiration_days
    error_message = "expiration_days must be a whole number, 1 or more: S3 counts in days."
  }
}

variable "kms_key_arn" {
  description = "Encrypt with this KMS key (SSE-KMS with a bucket key). Otherwise S3's own keys are used (SSE-S3), which cost nothing and have no request quota."
  type        = string
  default     = null

  validation {
    condition     = var.kms_key_arn == null || can(regex("^arn:aws[a-z-]*:kms:[a-z0-9-]+:[0-9]{12}:key/[A-Za-z0-9-]+$", var.kms_key_arn))
    error_message = "kms_key_arn must be the ARN of a key (arn:aws:kms:REGION:ACCOUNT:key/ID), not of an alias: policies cannot name an alias."
  }
}

variable "encryption_key" {
  description = "Create a KMS key for s3kv's setting `encryption`. It encrypts data keys: readers, writers and cleaners may decrypt them, and whoever makes them may not. The key costs a dollar a month."
  type        = bool
  default     = false
  nullable    = false
}

variable "force_destroy" {
  description = "Let `terraform destroy` delete the objects as well. They are a cache: everything in them can be computed again."
  type        = bool
  default     = true
  nullable    = false
}

variable "tags" {
  description = "Tags for everything that can carry them, beside `Application`, `ManagedBy` and `DataClass`."
  type        = map(string)
  default     = {}
  nullable    = false
}

# --- who may use it -----------------------------------------------------------------------------

variable "cleaner" {
  description = "A policy for engines that keep the bucket themselves (`bucket_bytes`, `bucket_idle_s`): a writer who may delete. Off: no policy of this module lets anybody delete."
  type        = bool
  default     = false
  nullable    = false
}

variable "pod_identities" {
  description = "EKS service accounts that get a role by Pod Identity, by a name of your choice. `access` is `reader`, `writer` or, with `cleaner`, `cleaner`."
  type = map(object({
    cluster_name    = string
    namespace       = string
    service_account = string
    access          = optional(string, "writer")
  }))
  default  = {}
  nullable = false

  validation {
    condition     = alltrue([for identity in values(var.pod_identities) : contains(["reader", "writer", "cleaner"], identity.access)])
    error_message = "access in pod_identities must be \"reader\", \"writer\" or \"cleaner\"."
  }

  validation {
    condition     = var.cleaner || alltrue([for identity in values(var.pod_identities) : identity.access != "cleaner"])
    error_message = "access in pod_identities is \"cleaner\", who may delete: set cleaner = true as well."
  }

  validation {
    condition     = alltrue([for name in keys(var.pod_identities) : length("${local.bucket_name}-${name}") <= 64])
    error_message = "a name in pod_identities is too long: with the bucket's name and a hyphen before it, it names a role, which may have 64 characters."
  }
}

variable "irsa" {
  description = "EKS service accounts that get a role by the cluster's OIDC provider, by a name of your choice. `access` is `reader`, `writer` or, with `cleaner`, `cleaner`."
  type = map(object({
    oidc_provider_arn = string
    namespace         = string
    service_account   = string
    access            = optional(string, "writer")
  }))
  default  = {}
  nullable = false

  validation {
    condition     = alltrue([for identity in values(var.irsa) : contains(["reader", "writer", "cleaner"], identity.access)])
    error_message = "access in irsa must be \"reader\", \"writer\" or \"cleaner\"."
  }

  validation {
    condition     = var.cleaner || alltrue([for identity in values(var.irsa) : identity.access != "cleaner"])
    error_message = "access in irsa is \"cleaner\", who may delete: set cleaner = true as well."
  }

  validation {
    condition     = alltrue([for identity in values(var.irsa) : can(regex("^arn:aws[a-z-]*:iam::[0-9]{12}:oidc-provider/.+$", identity.oidc_provider_arn))])
    error_message = "oidc_provider_arn must be the ARN of an IAM OIDC provider (arn:aws:iam::ACCOUNT:oidc-provider/ISSUER)."
  }

  validation {
    # "*" would let every service account of the cluster take the role.
    condition     = alltrue([for identity in values(var.irsa) : !can(regex("[*?]", "${identity.namespace}${identity.service_account}"))])
    error_message = "namespace and service_account in irsa must be names, not patterns."
  }

  validation {
    condition     = length(setintersection(keys(var.irsa), keys(var.pod_identities))) == 0
    error_message = "a name must not be in both irsa and pod_identities: it names a role."
  }

  validation {
    # Here and not at settings, whose errors would wait for those of the roles' names.
    condition     = !var.cleaner || var.storage == "express" || setsubtract(concat(values(var.pod_identities)[*].access, values(var.irsa)[*].access), ["reader"]) != toset(["writer"]) || try(var.settings.bucket_bytes, 0) == 0 && try(var.settings.bucket_idle_s, 0) == 0
    error_message = "bucket_bytes and bucket_idle_s in settings make engines delete, but access in pod_identities and irsa is \"writer\" at most, who may not: set access = \"cleaner\" for the engines with these settings."
  }

  validation {
    condition     = alltrue([for name in keys(var.irsa) : length("${local.bucket_name}-${name}") <= 64])
    error_message = "a name in irsa is too long: with the bucket's name and a hyphen before it, it names a role, which may have 64 characters."
  }
}

variable "permissions_boundary_arn" {
  description = "Permissions boundary for the roles, where your organisation demands one."
  type        = string
  default     = null

  validation {
    condition     = var.permissions_boundary_arn == null || can(regex("^arn:aws[a-z-]*:iam::([0-9]{12}|aws):policy/.+$", var.permissions_boundary_arn))
    error_message = "permissions_boundary_arn must be the ARN of a managed policy."
  }
}

# --- how it is reached --------------------------------------------------------------------------

variable "gateway_endpoint" {
  description = "Create a gateway endpoint (free; avoids NAT charges per GB) in these route tables. It serves only this bucket, ECR's image layers and, read-only, `extra_bucket_names` (wildcards allowed): everything else that goes to S3 through these route tables is refused."
  type = object({
    vpc_id             = string
    route_table_ids    = list(string)
    extra_bucket_names = optional(list(string), [])
  })
  default = null

  validation {
    condition     = var.gateway_endpoint == null || try(length(var.gateway_endpoint.route_table_ids), 0) > 0
    error_message = "gateway_endpoint needs at least one route table: without one it serves nobody."
  }

  validation {
    condition     = var.storage != "express" || try(length(var.gateway_endpoint.extra_bucket_names), 0) == 0
    error_message = "extra_bucket_names has no meaning with Express: its endpoint serves directory buckets only."
  }

  validation {
    condition     = alltrue([for name in try(var.gateway_endpoint.extra_bucket_names, []) : can(regex("[a-z0-9]", name))])
    error_message = "extra_bucket_names must not hold a name of wildcards alone: that would open the endpoint to every bucket of every account."
  }
}

# --- how it is watched --------------------------------------------------------------------------

variable "request_metrics" {
  description = "Request metrics per minute, and with them the alarms on errors and latency. By default on for `standard`, off for `express`, where not every provider version of the range can set them."
  type        = bool
  default     = null
}

variable "alarm_actions" {
  description = "What an alarm triggers, also when it ends: usually the ARN of an SNS topic."
  type        = list(string)
  default     = []
  nullable    = false

  validation {
    condition     = alltrue([for action in var.alarm_actions : startswith(action, "arn:")])
    error_message = "alarm_actions must be ARNs."
  }

  validation {
    condition     = length(var.alarm_actions) == 0 || coalesce(var.request_metrics, var.storage == "standard") || var.max_bucket_gib != null
    error_message = "alarm_actions are set but there is no alarm: turn request_metrics on or set max_bucket_gib."
  }
}

variable "max_error_percent" {
  description = "Alarm when more of the requests than this fail with a 5xx, which is how S3 throttles."
  type        = number
  default     = 1
  nullable    = false

  validation {
    condition     = var.max_error_percent > 0 && var.max_error_percent < 100
    error_message = "max_error_percent must be between 0 and 100."
  }
}

variable "max_first_byte_latency_ms" {
  description = "Alarm when the slowest percent of requests waits longer than this for its first byte. By default 500, with Express 50."
  type        = number
  default     = null

  validation {
    condition     = var.max_first_byte_latency_ms == null || try(var.max_first_byte_latency_ms > 0, false)
    error_message = "max_first_byte_latency_ms must be positive."
  }
}

variable "max_bucket_gib" {
  description = "Alarm when the bucket holds more than this: a budget, measured once a day. None by default."
  type        = number
  default     = null

  validation {
    condition     = var.max_bucket_gib == null || try(var.max_bucket_gib > 0, false)
    error_message = "max_bucket_gib must be positive."
  }
}

variable "dashboard" {
  description = "A CloudWatch dashboard of the bucket."
  type        = bool
  default     = true
  nullable    = false
}

# --- what its engines are told -------------------------------------------------------------------

variable "settings" {
  description = "Settings of s3kv for the four outputs that vLLM gets, such as `{ host_bytes = \"32GiB\" }`; docs/configuration.md lists them. `bucket`, `prefix` and `region` follow from the bucket. Readers get none of the settings that write or delete."
  type        = any
  default     = {}
  nullable    = false

  validation {
    condition     = can(keys(var.settings))
    error_message = "settings must be an object, such as { host_bytes = \"32GiB\" }."
  }

  validation {
    condition     = length(setintersection(try(keys(var.settings), []), ["bucket", "prefix", "region"])) == 0
    error_message = "settings must not hold bucket, prefix or region: they are those of the bucket."
  }

  validation {
    condition     = length(setsubtract(try(keys(var.settings), []), concat(local.setting_names, ["bucket", "prefix", "region"]))) == 0
    error_message = "s3kv has no such setting: ${join(", ", setsubtract(try(keys(var.settings), []), local.setting_names))}."
  }

  validation {
    condition     = var.cleaner || var.storage == "express" || try(var.settings.bucket_bytes, 0) == 0 && try(var.settings.bucket_idle_s, 0) == 0
    error_message = "bucket_bytes and bucket_idle_s in settings make engines delete: set cleaner = true as well, and give them the cleaner's policy."
  }
}

# --- what follows from them, and what their checks need ------------------------------------------

locals {
  express     = var.storage == "express"
  bucket_name = local.express ? "${var.name}--${var.availability_zone_id}--x-s3" : var.name

  # Those of s3kv/config.py, less those of the bucket.
  setting_names = [
    "addressing_style", "bucket_bytes", "bucket_idle_s", "ca_bundle", "chunk_tokens", "client",
    "compress", "disk_bytes", "disk_path", "disk_writes", "drain_timeout_s", "encryption", "encryption_keys_file",
    "endpoint_url", "host_bytes", "integrity", "integrity_secret_file",
    "max_inflight_requests", "max_wait_ms", "model_id", "on_unavailable",
    "put_headers", "refresh_after_s", "request_timeout_ms", "share_ranks", "trust_media_names",
    "verify_tls", "weights_digest",
  ]
}
